"""R-KV keeps what plain loops over the paper's definitions keep, over long generations and row by row."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from helpers import LONG, all_held, examples, feed, thinned
from reference import Choice, Loop, best
from small_models import left_padded, random_ids, small_model
from test_references import SIZES, compare, follow

from kvcompress import compress
from kvcompress.method import Schedule
from kvcompress.methods import RKV, Full, SnapKV
from kvcompress.methods import rkv as module

INTERVAL = 4


@dataclass
class LoopRKV(Loop):
    """Decides at prompt end, and in decode when `fires` says so for a row."""

    lam: float = 0.1
    window: int = 3
    interval: int = INTERVAL
    threshold: float = 0.5
    kernel: int = 7
    group_reduce: str = "max"
    duplicates: str = "newest"
    align: str = "row"
    outside: int = 0  # tokens kept beyond the budget
    queries: dict[tuple[int, int], list[tuple[int, list]]] = field(default_factory=dict)

    def observe(self, layer, b, query, key, features, row, new, offset):
        kept = self.queries.setdefault((layer, b), [])
        kept += [(c, query[:, c - offset]) for c in new]
        del kept[: -self.window]

    def fires(self, b: int, held: int, cap: int) -> bool:
        total = int(self.reference.mask[b].sum())
        if total == self.prompt_length(b):
            return held > cap
        if self.align == "total":
            return held > cap and total % self.interval == 0
        return held >= cap + self.interval

    def prompt_length(self, b: int) -> int:
        return self.lengths[b]

    def importance(self, layer, b, key, features, h, prefix):
        """Mean over the window's queries of the softmax over the prefix, max-pooled."""
        group = self.queries[layer, b][0][1].shape[0] // key.shape[0]
        found = torch.zeros(len(prefix), dtype=torch.float64)
        for at, query in self.queries[layer, b]:
            each = (query[h * group : (h + 1) * group] @ key[h, prefix].T).double() * features.scaling
            if features.softcap is not None:
                each = features.softcap * torch.tanh(each / features.softcap)
            logits = each.amax(0) if self.group_reduce == "max" else each.mean(0)
            logits[torch.tensor(prefix) > at] = -torch.inf
            if logits.max() > -torch.inf:
                found += torch.softmax(logits, 0) / len(self.queries[layer, b])
        half, total = self.kernel // 2, found.tolist()
        return [max(total[max(0, j - half) : j + half + 1]) for j in range(len(total))]

    def redundancy(self, key, h, columns):
        """Softmax over all held tokens of the mean cosine that a token gets."""
        unit = key[h, columns].double()
        unit = unit / (unit.norm(dim=1, keepdim=True) + 1e-8)
        alike = (unit @ unit.T).fill_diagonal_(0.0)
        for i, row in enumerate(alike):
            matches = [j for j, cosine in enumerate(row.tolist()) if cosine > self.threshold]
            if self.duplicates == "published":
                row[max(matches) if matches else 0] = 0.0
            elif matches and max(matches) > i:
                row[max(matches)] = 0.0
        return torch.softmax(alike.mean(0), 0).tolist()

    def decide(self, layer, b, query, key, features, row):
        cap = self.caps[b] + self.outside
        if not self.fires(b, len(row[0]), cap):
            return
        window = self.window if cap >= self.window + 1 else min(self.window, cap // 2)
        for h in range(len(row)):
            columns = sorted(row[h])
            prefix, recent = columns[: len(columns) - window], columns[len(columns) - window :]
            importance = self.importance(layer, b, key, features, h, prefix)
            alike = self.redundancy(key, h, columns)[: len(prefix)]
            scores = {c: self.lam * i - (1 - self.lam) * r for c, i, r in zip(prefix, importance, alike, strict=True)}
            row[h] = best(scores, cap - window) | set(recent)
            self.choices[layer, b, h] = Choice(set(row[h]), scores, set(recent))


def loop(lengths):
    """A loop class that knows its prompts' lengths."""
    return type("LoopRKV", (LoopRKV,), {"lengths": lengths})


OPTIONS = [
    {},
    {"lam": 0.5, "group_reduce": "mean", "kernel": 3},
    {"lam": 0.0},
    {"lam": 1.0},
    {"lam": 0.3, "duplicates": "published", "align": "total"},
    {"lam": 0.3, "threshold": 0.0, "kernel": 1},
    {"lam": 0.3, "threshold": 0.9, "window": 1},
]


@pytest.mark.parametrize(("options", "sizes"), thinned(OPTIONS, SIZES, every=4))
def test_it_keeps_what_the_loop_keeps(options, sizes):
    """Every field, with one to four query heads per KV head, on padded rows, in prompt and decode."""
    options = {"window": 3, "interval": INTERVAL, "lam": 0.1, **options}
    follow(RKV(budget=9, **options), loop([24, 15]), sizes=sizes, later=(1,) * 10, **options)


def test_a_share_and_a_window_beyond_the_budget_keep_what_the_loop_keeps():
    options = {"window": 3, "interval": INTERVAL, "lam": 0.2}
    follow(RKV(budget=0.3, **options), loop([24, 15]), later=(1,) * 12, **options)
    follow(RKV(budget=6, window_inside=False, **options), loop([24, 15]), later=(1,) * 12, outside=3, **options)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt_oss"])
def test_logits_are_the_models_own(architecture):
    options = {"window": 3, "interval": INTERVAL, "lam": 0.7}
    follow(RKV(budget=8, **options), loop([24, 15]), architecture=architecture, later=(1,) * 9, **options)


SETTING = {"window": 8, "lam": 0.1} | ({"budget": 40, "interval": 32} if LONG else {"budget": 24, "interval": 16})
GROUPS = {
    1: {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 48},
    3: {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
}
BATCHES = {1: [60], 3: [60, 12, 35]}
USUAL = [(0, 3, 3)]
CASES = [(seed, group, batch) for seed in range(20) for group in GROUPS for batch in BATCHES]


@pytest.mark.parametrize(
    ("seed", "group", "batch"),
    [case if case in USUAL else pytest.param(*case, marks=pytest.mark.long) for case in CASES],
)
def test_hundreds_of_decoded_tokens_keep_what_the_loop_keeps(seed, group, batch):
    """Through four compressions of every row, with `--long` thirty, each at its own count, nothing drifts from the loop."""
    steps = examples(80, 1000)
    lengths = BATCHES[batch]
    options = {"num_hidden_layers": 2, "head_dim": 8, "max_position_embeddings": 2048, "seed": seed}
    model, twin = (small_model(**GROUPS[group], **options, twin=twin) for twin in (False, True))
    ids, mask = left_padded(lengths, seed)
    tokens = random_ids(len(lengths), steps, seed + 50)
    adopted = 0
    with compress(model, RKV(**SETTING)) as session, loop(lengths)(twin, **SETTING) as reference:
        session.prefill(ids, attention_mask=mask)
        reference.step(ids, mask)
        for step in range(steps):
            mask = torch.cat([mask, mask.new_ones(len(lengths), 1)], 1)
            got = feed(model, session.cache, tokens[:, step : step + 1], mask)[:, -1]
            expected = reference.step(tokens[:, step : step + 1])[:, -1]
            if step % 8 == 7 or step == steps - 1:  # more often than anything is dropped
                adopted += compare(session, reference, lengths, ids.shape[1])
        assert (got - expected).abs().max() <= 1e-4
        decisions = steps // SETTING["interval"] * len(lengths) * 4
        assert session.report()["evicted"] == sum(n + steps for n in lengths) * 4 - int(
            session.cache.kept_tokens().sum()
        )
    assert adopted <= decisions // 20, "ties are rare: most sets are exactly the loop's"


def test_without_redundancy_it_is_selection_by_the_windows_attention():
    """lam=1 keeps SnapKV's choice where scores agree: one query head per KV head, and a softmax over the prefix alone."""
    model, ids = small_model(groups=1), random_ids(1, 60)
    with compress(model, RKV(budget=20, window=1, kernel=7, lam=1.0)) as session:
        mine = session.prefill(ids).cache.positions(1)
    with compress(model, SnapKV(budget=20, window=1, kernel=7, pooling="max")) as session:
        # of a single query the two normalisations rank alike
        assert torch.equal(mine, session.prefill(ids).cache.positions(1))


def test_without_importance_queries_do_not_matter():
    """lam=0 depends on keys alone: other query weights keep the same tokens."""
    held = []
    for factor in (1.0, -3.0):
        model = small_model(num_hidden_layers=1, fresh=True)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(factor)
        with compress(model, RKV(budget=12, window=3, lam=0.0)) as session:
            session.prefill(random_ids(1, 40))
            held.append(all_held(session))
    assert held[0] == held[1]


def alike(keys, **options):
    keys = torch.as_tensor(keys, dtype=torch.float32).view(1, 1, len(keys), -1)
    options = {"threshold": 0.5, "duplicates": "newest", **options}
    return module.redundancy(keys, torch.ones(keys.shape[:3], dtype=torch.bool), **options)[0, 0]


@pytest.mark.parametrize("distance", [1, 50, 195])
def test_of_two_exact_duplicates_the_later_one_stays(distance):
    """With equal importance and room for one of them, however far apart they are."""
    keys = torch.eye(200)[:, :].clone()  # nothing else is like anything
    keys[2 + distance] = keys[2]
    scores = alike(keys)
    assert scores.argmax() == 2 and scores[2] > scores[2 + distance]
    assert alike(keys, duplicates="published")[2] == pytest.approx(float(alike(keys, duplicates="published")[50]))


def test_of_two_exact_duplicates_in_a_cache_the_later_one_stays():
    """The same from outside, where attention is even: no budget keeps the earlier without the later, some one alone."""
    model = small_model(num_hidden_layers=1, groups=1, fresh=True)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
        model.model.rotary_emb.inv_freq.zero_()  # no rotation: equal tokens have equal keys
    ids = torch.arange(2, 62)[None]
    ids[0, 40] = ids[0, 5]
    alone = set()
    for budget in range(59, 10, -3):
        with compress(model, RKV(budget=budget, window=8, lam=0.1)) as session:
            session.prefill(ids)
            for head, row in enumerate(all_held(session)[0][0]):
                assert 5 not in row or 40 in row
                if 5 not in row and 40 in row:
                    alone.add(head)
    assert len(alone) >= 2


def test_the_newest_of_many_copies_looks_least_redundant():
    keys = torch.eye(12)
    for copy in (4, 7, 11):
        keys[copy] = keys[1]
    scores = alike(keys)
    assert scores[11] == scores.min() and min(scores[1], scores[4], scores[7]) > scores[11]


def test_redundancy_is_a_distribution_over_what_is_held():
    """It sums to 1, is even among orthogonal keys, and ignores what lies in empty slots and the length of keys."""
    keys = torch.randn(2, 3, 20, 8, generator=torch.Generator().manual_seed(0))
    held = torch.ones(2, 3, 20, dtype=torch.bool)
    held[0, :, :6] = False
    held[1, 1, 9] = False
    got = module.redundancy(keys, held, 0.5, "newest")
    assert torch.allclose(got.sum(-1), torch.ones(2, 3)) and (got[~held] == 0).all()
    garbage = keys.clone()
    garbage[~held] = float("nan")
    assert torch.equal(module.redundancy(garbage, held, 0.5, "newest"), got)
    assert torch.allclose(module.redundancy(keys * 7.0, held, 0.5, "newest"), got, atol=1e-6)
    alone = module.redundancy(keys[:1, :, 6:], held[:1, :, 6:], 0.5, "newest")
    assert torch.allclose(alone[0], got[0, :, 6:], atol=1e-7)
    even = alike(torch.eye(10))
    assert torch.allclose(even, torch.full((10,), 0.1))


@pytest.mark.parametrize("duplicates", ["newest", "published"])
def test_the_size_of_blocks_changes_nothing(duplicates, monkeypatch):
    keys = torch.randn(2, 2, 50, 4, generator=torch.Generator().manual_seed(1))
    held = torch.ones(2, 2, 50, dtype=torch.bool)
    whole = module.redundancy(keys, held, 0.3, duplicates)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 1400)
    assert torch.allclose(module.redundancy(keys, held, 0.3, duplicates), whole, atol=1e-7)


def test_no_matrix_of_all_pairs_is_made_for_long_prompts(monkeypatch):
    """Every product of keys with keys stays within the block size."""
    biggest = []
    product = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: biggest.append(product(a, b)) or biggest[-1])
    keys = torch.randn(1, 1, 6000, 4)
    module.redundancy(keys, torch.ones(1, 1, 6000, dtype=torch.bool), 0.5, "newest")
    assert len(biggest) > 1 and max(x.numel() for x in biggest) <= module.BLOCK_ELEMENTS


def test_a_total_below_the_budget_equals_the_full_cache():
    model, ids = small_model(), random_ids(1, 30)
    outputs = []
    for method in (Full(), RKV(budget=64, interval=4), RKV(budget=64, interval=4, preset="code")):
        with compress(model, method) as session:
            session.prefill(ids)
            outputs.append((session.generate(30).tokens, session.report()["evicted"]))
    assert outputs == [outputs[0]] * 3 and outputs[0][1] == 0


@pytest.mark.parametrize(("align", "at"), [("row", [24, 28, 32]), ("total", [20, 24, 28, 32])])
def test_compressions_come_at_the_counts_that_were_asked_for(align, at):
    """From the prompt's 19 tokens, cut to 12: at budget + interval held, or at multiples of the interval in all."""
    model = small_model()
    with compress(model, RKV(budget=12, window=3, interval=4, align=align)) as session:
        session.prefill(random_ids(1, 19))
        fired = []
        for total in range(20, 35):
            before = int(session.cache.kept_tokens()[0, 0, 0])
            session.step(random_ids(1, 1, total))
            if int(session.cache.kept_tokens()[0, 0, 0]) <= before:
                fired.append(total)
                assert session.cache.kept_tokens().unique().tolist() == [12]
    assert fired == ([23, 27, 31] if align == "row" else at)


def test_line_breaks_compress_and_the_end_of_thinking_stops_it():
    """A row is cut to its budget when a line break is fed, on its own, and never again after the closing tag."""
    model = small_model()
    schedule = Schedule(newline=True, until="</think>", newline_ids=(7, 8), until_ids=(9,))
    with compress(model, RKV(budget=12, window=3, schedule=schedule)) as session:
        session.prefill(random_ids(2, 19).clamp(min=10))
        counts = []
        for tokens in ([20, 7], [8, 20], [9, 20], [7, 7], [20, 20]):
            session.step(torch.tensor(tokens)[:, None])
            counts.append(session.cache.kept_tokens()[0, :, 0].tolist())
        assert counts == [[13, 12], [12, 13], [13, 14], [14, 12], [15, 13]]
        fork = session.cache.fork()
        assert fork.sequence.closed.tolist() == [True, False]
        session.prefill(random_ids(2, 4).clamp(min=10), cache=session.cache)
        assert session.cache.sequence.closed is None and session.cache.kept_tokens().unique().tolist() == [12]


def test_a_line_break_that_is_fed_to_a_row_that_has_ended_cuts_nothing():
    schedule = Schedule(newline=True, newline_ids=(7,))
    with compress(small_model(), RKV(budget=12, window=3, schedule=schedule)) as session:
        session.prefill(random_ids(2, 19).clamp(min=10))
        session.step(torch.tensor([[20], [20]]))
        session.step(torch.tensor([[7], [7]]), real=torch.tensor([True, False]))
        assert session.cache.kept_tokens()[0, :, 0].tolist() == [12, 13]


class Words:
    """A tokenizer of a few words."""

    texts = ["a", "b\n", "\n\n", "</think>", "c"]

    def __len__(self):
        return len(self.texts)

    def batch_decode(self, ids):
        return ["".join(self.texts[i] for i in row) for row in ids]

    def encode(self, text, add_special_tokens=True):
        return [self.texts.index(text)] if text in self.texts else [0, 4]


def test_texts_become_token_ids_and_are_refused_without(monkeypatch):
    """A schedule that speaks of tokens needs a tokenizer, and a closing tag of one token."""
    method = RKV(budget=12, window=3, schedule=Schedule(newline=True, until="</think>"))
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="tokenizer=tokenizer"):
        patch.setattr("kvcompress.models.tokenizers.tokenizer_of", lambda model: None)
        compress(small_model(), method)
    schedule = compress(small_model(), method, tokenizer=Words()).method.parts().schedule
    assert schedule.newline_ids == (1, 2) and schedule.until_ids == (3,)
    assert str(schedule) == "prompt+newline until </think>" and str(method.parts().schedule) == str(schedule)
    with pytest.raises(ValueError, match="must be one"):
        RKV(budget=12, schedule=Schedule(every=2, until="</thought>")).for_tokenizer(Words())
    plain = RKV(budget=12)
    assert plain.for_tokenizer(Words()) is plain


@pytest.mark.parametrize(
    "options",
    [
        {"lam": -0.1},
        {"window": 0},
        {"interval": 0},
        {"threshold": 1.0},
        {"kernel": 4},
        {"duplicates": "none"},
        {"group_reduce": "sum"},
        {"budget": 8},
    ],
)
def test_illegal_settings_are_refused_by_name(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        RKV(**{"budget": 0.5, **options})
