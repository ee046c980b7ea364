"""Models that accelerate spreads: weights that come and go around each layer."""

from __future__ import annotations

import copy

import torch
from accelerate import disk_offload
from small_models import random_ids, small_model

from kvcompress import compress
from kvcompress.methods import H2O, Full


def test_an_offloaded_model_gives_what_it_gives_in_memory(tmp_path):
    """accelerate's hooks around every module leave cache, phases and masks as they are."""
    model = small_model()
    spread = copy.deepcopy(model)
    disk_offload(spread, str(tmp_path), execution_device=torch.device("cpu"))
    ids = random_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    stock = model.generate(ids, **options)
    for method in (Full(), H2O(budget=0.4)):
        with compress(spread, method):
            found = spread.generate(ids, **options)
        with compress(model, method):
            expected = model.generate(ids, **options)
        assert torch.equal(found, expected)
        assert torch.equal(found, stock) == (method == Full())
