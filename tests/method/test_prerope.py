"""What a part sees of a forward's queries, before and after rotation."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from small_models import left_padded, random_ids, small_model
from transformers import AutoConfig, AutoModelForCausalLM

from kvcompress import compress
from kvcompress.method import Chunked, Method, Needs, Schedule, Scorer
from kvcompress.methods import StreamingLLM
from kvcompress.models.rotation import Rotation


@dataclass(frozen=True, eq=False)
class Watcher(Scorer):
    """Notes what it is shown; what it asks for is declared or not."""

    prerope: bool = True
    ahead: int = 5
    notes: list = field(default_factory=list)

    @property
    def needs(self):
        return Needs(prerope=self.prerope)

    def observe(self, view, observed, state):
        before, positions = observed.prerope
        after, _ = observed.queries
        matrix = observed.mean_rotation(self.ahead)
        self.notes.append((view.layer, view.phase, before.clone(), after.clone(), positions.clone(), matrix))

    def score(self, view, observed, state):
        assert observed.prerope[0].dtype == torch.float32
        return torch.zeros(view.positions.shape)


@dataclass(frozen=True, kw_only=True)
class Watching(Method):
    watcher: Watcher = field(default_factory=Watcher)

    def make_scorer(self):
        return self.watcher


def raw_queries(model):
    """Hooks that note what each layer's query projection (or its norm) gives, `[B, H, n, D]`."""
    found: dict[int, list[torch.Tensor]] = {}
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        per_head = hasattr(attention, "q_norm") and model.config.model_type != "olmo2"
        module = attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj

        def note(_module, _args, out, i=i, per_head=per_head):
            out = out if out.dim() == 4 else out.unflatten(-1, (-1, 16))
            found.setdefault(i, []).append(out if per_head and out.shape[1] == 4 else out.transpose(1, 2))

        module.register_forward_hook(note)
    return found


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "olmo2", "smollm3", "glm4", "cohere2", "gemma3_text"])
def test_queries_before_rotation_are_what_the_projection_gave(architecture):
    """Half-split, interleaved, partial and no rotation, query norms, hybrid models, left-padded rows."""
    model = small_model(architecture, fresh=True)
    method = Watching(budget=0.5)
    ids, mask = left_padded([14, 9])
    with compress(model, method) as session:
        raw = raw_queries(model)
        session.prefill(ids, attention_mask=mask)
        assert [note[0] for note in method.watcher.notes] == session.full_layers
        for layer, phase, before, after, positions, _ in method.watcher.notes:
            assert phase == "prompt" and before.shape == after.shape == (2, 2, 2, 14, 16)
            real = positions >= 0
            assert positions.tolist() == [[*range(14)], [-1] * 5 + [*range(9)]]
            difference = (before.flatten(1, 2) - raw[layer][-1]).abs().amax((1, 3))
            assert difference[real].max() <= 1e-4


@pytest.mark.parametrize(
    ("style", "pairs"), [("half", [(0, 2), (1, 3)]), ("interleaved", [(0, 1), (2, 3)])], ids=["half", "interleaved"]
)
def test_a_style_says_which_channels_turn_together(style, pairs):
    turned = Rotation(style, torch.tensor([1.0, 0.1])).rotate(torch.eye(4)[None, None], torch.full((1, 1, 4), 3))
    for pair in pairs:
        assert all(turned[0, 0, channel].nonzero().flatten().tolist() == list(pair) for channel in pair)


def test_rotating_ahead_by_one_is_what_the_model_does_next():
    """The mean over one position turns a query as the model would at the position after the row's last token."""
    model = small_model()
    method = Watching(budget=0.5, watcher=Watcher(ahead=1), schedule=Schedule(every=1))
    ids, mask = left_padded([14, 9])
    with compress(model, method) as session:
        session.prefill(ids, attention_mask=mask)
        session.generate(2)
        prompt, decode = method.watcher.notes[0], method.watcher.notes[3]
        assert decode[1] == "decode" and decode[4].tolist() == [[14], [9]]
        turned = decode[2] @ prompt[5].transpose(1, 2)[:, None, None]
        assert (turned - decode[3]).abs().max() <= 1e-4


def test_positions_that_count_padding_are_followed():
    """Called without position ids, the model rotates by column; the next position counts on from there."""
    model = small_model()
    ids, mask = left_padded([14, 9])
    found = []
    for positions in (None, (mask.cumsum(1) - 1).clamp(min=0)):
        method = Watching(budget=0.5, watcher=Watcher(ahead=1))
        with compress(model, method):
            model(ids, attention_mask=mask, position_ids=positions)
        found.append(method.watcher.notes[0])
    by_column, by_token = found
    real = by_column[4] >= 0
    difference = (by_column[2] - by_token[2]).abs().amax((1, 2, 4))
    assert difference[real].max() <= 1e-4
    assert torch.allclose(by_column[5][0], by_token[5][0]) and torch.allclose(by_column[5][0], by_column[5][1])
    assert not torch.allclose(by_token[5][0], by_token[5][1], atol=1e-2)


def test_every_chunk_is_seen_also_where_nothing_is_evicted():
    method = Watching(budget=50, prefill=Chunked(chunk=6))
    with compress(small_model(), method) as session:
        session.prefill(random_ids(1, 14))
        session.append(random_ids(1, 3))
        session.generate(3)
    assert [note[4].shape[1] for note in method.watcher.notes if note[0] == 0] == [6, 6, 2]


def test_nothing_of_the_queries_stays_behind():
    method = Watching(budget=0.5)
    with compress(small_model(), method) as session:
        session.prefill(random_ids(1, 14))
        assert all(layer.queries is None and not layer.state for layer in session.cache.full_layers)


def test_what_was_not_declared_is_not_given():
    method = Watching(budget=0.5, watcher=Watcher(prerope=False))
    with compress(small_model(), method) as session, pytest.raises(ValueError, match="prerope"):
        session.prefill(random_ids(1, 14))


def test_a_rotation_that_depends_on_the_length_is_refused_by_name():
    scaled = small_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with (
        pytest.raises(ValueError, match=r"llama.*depends on the length \(dynamic"),
        compress(scaled, Watching(budget=0.5)),
    ):
        pass


def test_a_model_without_rotation_is_refused_by_name():
    config = AutoConfig.for_model(
        "opt",
        hidden_size=32,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
        word_embed_proj_dim=32,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="'opt' has no rotary positions"), compress(model, Watching(budget=0.5)):
        pass


def test_at_full_budget_no_rotation_is_looked_for():
    """Nothing is observed then, so a model that could not be observed runs as it is."""
    scaled = small_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with compress(scaled, Watching(budget=1.0)) as session:
        assert session.prefill(random_ids(1, 14)).logits.isfinite().all()


def test_compact_positions_cannot_show_queries_before_rotation():
    @dataclass(frozen=True, kw_only=True)
    class Both(StreamingLLM):
        def make_scorer(self):
            return Watcher()

    with pytest.raises(ValueError, match="compact positions rotate queries anew"):
        Both(budget=0.5, positions="compact")
