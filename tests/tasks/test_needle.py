"""The needle task: prompts are assembled in token space, right to the token, the same for both protocols."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from kvcompress.common.prose import Encoder, built_in_prose
from kvcompress.data.haystack import NOISE, load_haystack, split_sentences
from kvcompress.models.random_models import byte_tokenizer
from kvcompress.tasks import TASKS
from kvcompress.tasks.needle import CLASSIC_NEEDLE, Needle

TOKENIZER = byte_tokenizer()


def tokenizer(adds_bos: bool, template_adds_bos: bool | None):
    """A byte tokenizer of each convention; `template_adds_bos=None` has no chat template."""
    made = byte_tokenizer()
    if not adds_bos:
        made.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if template_adds_bos is None:
        made.chat_template = None
    elif not template_adds_bos:
        made.chat_template = made.chat_template.replace("{{ bos_token }}", "")
    return made


@given(
    length=st.integers(420, 1500),
    depth=st.floats(0, 1),
    seed=st.integers(0, 5),
    haystack=st.sampled_from(["noise", "essay"]),
    template=st.sampled_from(["chat", "none"]),
)
@settings(max_examples=20, deadline=None)
def test_prompt_fills_its_length_and_holds_the_needle_once_at_its_depth(length, depth, seed, haystack, template):
    task = Needle(lengths=(length,), depths=(depth,), haystack=haystack, template=template, seed=seed)
    (sample,) = task.samples(TOKENIZER)
    ids = sample.prompt_ids()
    assert 0.95 * length <= len(ids) <= length
    assert ids.count(TOKENIZER.bos_token_id) == 1 and ids[0] == TOKENIZER.bos_token_id
    (value,) = sample.turns[0].references
    text = TOKENIZER.decode(ids)
    assert text.count(value) == 1
    needle = text[text.index("One of the special magic numbers for ") : text.index(value) + len(value) + 1]
    (offset,) = sample.meta["needle_offsets"]
    encoded = TOKENIZER.encode(needle, add_special_tokens=False)
    at = offset + (TOKENIZER.decode(ids[offset]) == " ")  # in prose the space before a needle belongs to it
    assert ids[at : at + len(encoded)] == encoded
    # depth is right within one sentence, counted in tokens of hay
    (reached,) = sample.meta["needle_depths"]
    longest = max(len(s) for s in load_haystack(haystack).sentences) + 1
    assert abs(reached - depth) * sample.meta["hay_tokens"] <= longest


@given(length=st.integers(420, 1500), depth=st.floats(0, 1), form=st.sampled_from(["ruler", "classic"]))
@settings(max_examples=10, deadline=None)
def test_hidden_and_seen_questions_give_the_same_token_ids(length, depth, form):
    seen, hidden = (
        next(iter(Needle(form=form, lengths=(length,), depths=(depth,), question=question).samples(TOKENIZER)))
        for question in ("seen", "hidden")
    )
    assert seen.prompt_ids() == hidden.prompt_ids()
    assert not seen.turns[0].ids and hidden.turns[0].ids
    assert seen.meta["prompt_hash"] == hidden.meta["prompt_hash"] and seen.id == hidden.id


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template_adds_bos", [True, False, None])
@pytest.mark.parametrize("template", ["auto", "none"])
def test_prompt_starts_with_the_number_of_bos_the_convention_intends(adds_bos, template_adds_bos, template):
    made = tokenizer(adds_bos, template_adds_bos)
    (sample,) = Needle(lengths=(500,), depths=(0.5,), template=template).samples(made)
    chat = template == "auto" and template_adds_bos is not None
    expected = int(bool(template_adds_bos)) if chat else int(adds_bos)
    assert sample.prompt_ids().count(made.bos_token_id) == expected
    assert sample.protocol["template"] == ("chat" if chat else "none")


def test_same_seed_gives_the_same_samples_and_another_seed_gives_others():
    def hashes(seed):
        task = Needle(seed=seed, haystack="essay", lengths=(600, 900), n_seeds=2)
        return [(sample.id, sample.meta["prompt_hash"]) for sample in task.samples(TOKENIZER)]

    assert hashes(3) == hashes(3)
    assert not {h for _, h in hashes(3)} & {h for _, h in hashes(4)}
    assert len({key for key, _ in hashes(3)}) == len(hashes(3)) == 2 * 5 * 2


@given(keys=st.integers(1, 4), values=st.integers(1, 4), queries=st.integers(1, 4), seed=st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_every_needle_is_hidden_once_and_all_answers_are_asked_for(keys, values, queries, seed):
    task = Needle(n_keys=keys, n_values=values, n_queries=queries, lengths=(3000,), depths=(0.3,), seed=seed)
    (sample,) = task.samples(TOKENIZER)
    text = TOKENIZER.decode(sample.prompt_ids())
    count = max(keys, queries) * values
    assert text.count("One of the special magic numbers for ") == count == len(sample.meta["needle_depths"])
    references = sample.turns[0].references
    assert len(set(references)) == queries * values and all(text.count(value) == 1 for value in references)
    assert ("What are all" in text) == (queries * values > 1)


def test_wording_is_rulers_for_one_answer_and_for_several():
    (one,) = Needle(lengths=(500,), depths=(0.5,), template="none").samples(TOKENIZER)
    text = TOKENIZER.decode(one.prompt_ids(), skip_special_tokens=True)
    assert text.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\n" + NOISE[0]
    )
    key = text.rsplit("special magic number for ", 1)[1].split(" mentioned")[0]
    assert text.endswith(
        f"\nWhat is the special magic number for {key} mentioned in the provided text? "
        f"The special magic number for {key} mentioned in the provided text is"
    )
    (many,) = Needle(lengths=(900,), depths=(0.5,), n_queries=2, template="none").samples(TOKENIZER)
    text = TOKENIZER.decode(many.prompt_ids(), skip_special_tokens=True)
    assert text.startswith("Some special magic numbers are hidden within the following text. Make sure to memorize it.")
    assert ", and " in text.rsplit("What are all the special magic numbers for ", 1)[1]
    assert text.endswith("mentioned in the provided text are")


def test_the_needle_stands_on_its_own_line_in_noise():
    (sample,) = Needle(lengths=(700,), depths=(0.37,)).samples(TOKENIZER)
    lines = TOKENIZER.decode(sample.prompt_ids()).splitlines()
    assert sum(line.startswith("One of the special magic numbers for ") and line.endswith(".") for line in lines) == 1


def test_score_is_the_share_of_references_in_the_answer():
    task = Needle(n_values=2, lengths=(700,), depths=(0.5,))
    (sample,) = task.samples(TOKENIZER)
    first, second = sample.turns[0].references
    assert task.score(sample, {"text": [f" {first}, and {second}."]}) == {"score": 1.0}
    assert task.score(sample, {"text": [f"It says\x02{first}"]}) == {"score": 0.5}
    assert task.score(sample, {"text": [""]}) == {"score": 0.0}
    assert task.score(sample, {"text": [first[:-1] + "x"]}) == {"score": 0.0}
    classic = Needle(form="classic", lengths=(600,), depths=(0.5,))
    (sample,) = classic.samples(TOKENIZER)
    assert classic.score(sample, {"text": [CLASSIC_NEEDLE.upper()]}) == {"score": 1.0}
    assert classic.score(sample, {"text": ["you should sit in dolores park and eat a sandwich"]}) == {"score": 1.0}
    assert classic.score(sample, {"text": ["visit the bridge"]}) == {"score": 0.0}


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"form": "rular"}, "ruler, classic"),
        ({"depths": (1.2,)}, "from 0.0 to 1.0"),
        ({"lengths": ()}, "at least one value"),
        ({"n_seeds": 0}, "n_seeds=0"),
        ({"question": "maybe"}, "seen, hidden"),
        ({"form": "classic", "n_keys": 2}, "form=ruler"),
        ({"depths": (0.5, 0.5)}, "twice"),
    ],
)
def test_wrong_setting_says_what_is_allowed(wrong, says):
    with pytest.raises(ValueError, match=says):
        Needle(**wrong)


def test_too_short_a_length_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="task.lengths: 60 tokens are too few"):
        list(Needle(lengths=(60,)).samples(TOKENIZER))


def test_essays_are_taken_from_the_data_folder_and_named_in_the_fingerprint(tmp_path):
    folder = tmp_path / "niah" / "PaulGrahamEssays"
    folder.mkdir(parents=True)
    (folder / "b.txt").write_text("Second essay here. It goes on. ")
    (folder / "a.txt").write_text("First essay\nhere. ")
    hay = load_haystack("essay", str(tmp_path))
    assert list(hay.sentences) == ["First essay here.", "Second essay here.", "It goes on."]
    assert Needle(haystack="essay", data=str(tmp_path)).fingerprint() == {"haystack": "essay:PaulGraham"}
    assert Needle(haystack="essay").fingerprint() == {"haystack": "essay:builtin"}
    assert Needle(haystack="essay", essays="builtin", data=str(tmp_path)).fingerprint() == {"haystack": "essay:builtin"}
    with pytest.raises(ValueError, match="paths.data"):
        list(Needle(haystack="essay", essays="files").samples(TOKENIZER))


def test_built_in_prose_varies_and_holds_no_digit():
    prose = built_in_prose()
    sentences = [next(prose) for _ in range(2000)]
    assert len(set(sentences)) > 1600 and Counter(sentences).most_common(1)[0][1] < 30
    text = " ".join(sentences)
    assert not any(char.isdigit() for char in text) and "San Francisco" not in text
    assert split_sentences(" ".join(sentences[:50])) == sentences[:50]


def test_encoder_undoes_the_space_a_tokenizer_invents():
    class Spacing:
        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return [ord(char) for char in "_" + text.replace(" ", "_")]

    encode = Encoder(Spacing())
    assert "".join(map(chr, encode("red") + encode(" green"))) == "red_green"


def test_tasks_are_found_by_name():
    assert TASKS["needle"] is Needle
