"""fuse_lm_head on tiny models of random weights: training steps equal the unpatched model's, and no logits are held."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from logitless.adapters.transformers import fuse_lm_head, unfuse_lm_head  # noqa: E402

torch.set_num_threads(1)  # models this small lose more to handing work over than they gain

V = 97
TINY = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
FAMILIES = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "phi": {},  # the head has a bias
    "gpt2": GPT2,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "mixtral": {},
}


def tiny(family, dtype=torch.float32):
    name = family.partition(",")[0]
    try:
        config = transformers.AutoConfig.for_model(name, **{**TINY, **FAMILIES[family]})
    except (ValueError, KeyError):
        pytest.skip(f"this Transformers has no {name}")
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)  # logits that are not all alike
    return model


def batches(n=3, length=11):
    generator = torch.Generator().manual_seed(5)
    for _ in range(n):
        ids = torch.randint(3, V, (2, length), generator=generator)
        labels = ids.clone()
        labels[0, :3] = -100
        yield ids, labels


def train(model, **more):
    """Losses of three steps of SGD, the gradients of the first step, and the weights after the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, gradients = [], None
    for ids, labels in batches():
        out = model(input_ids=ids, labels=labels, **more)
        optimizer.zero_grad()
        out.loss.backward()
        if gradients is None:
            gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        losses.append(out.loss.detach())
    return torch.stack(losses), gradients, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_training_steps_equal_the_unpatched_models(family):
    plain = tiny(family)
    fused = fuse_lm_head(copy.deepcopy(plain))
    for more in ({}, {"num_items_in_batch": torch.tensor(40)}):
        want, got = train(plain, **more), train(fused, **more)
        assert torch.allclose(got[0], want[0], rtol=1e-5), family
        for a, b in zip(got[1], want[1]):
            assert (a - b).norm() <= 5e-6 * b.norm() + 1e-7, family
        for a, b in zip(got[2], want[2]):  # three steps of a model as sharp as this one spread a difference
            assert (a - b).norm() <= 1e-4 * (1 + b.norm()), family
        if family not in ("llama", "gemma2"):
            break


def test_bf16_training_is_as_close_to_float32_as_the_unpatched_models():
    exact, plain = tiny("llama"), tiny("llama", torch.bfloat16)
    exact.load_state_dict({k: v.float() for k, v in plain.state_dict().items()})
    fused = fuse_lm_head(copy.deepcopy(plain))
    want, theirs, ours = train(exact)[0], train(plain)[0], train(fused)[0]
    assert (ours - want).abs().max() <= (theirs - want).abs().max() + 2e-3


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation gave."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return out


def test_memory_falls_no_tensor_has_the_size_of_the_logits():
    plain = tiny("llama")
    fused = fuse_lm_head(copy.deepcopy(plain))
    largest = []
    for model in (plain, fused):
        ids, labels = next(batches(1, length=64))
        with Largest() as seen:
            model(input_ids=ids, labels=labels).loss.backward()
        largest.append(seen.elements)
    assert largest[0] >= 2 * 64 * V > largest[1]


def test_everything_else_is_the_models_own():
    model = fuse_lm_head(tiny("llama"))
    ids, labels = next(batches(1))
    assert model(input_ids=ids).logits.shape == (2, 11, V)
    assert model(input_ids=ids, labels=labels).logits is None
    assert model(input_ids=ids, labels=labels, logits_to_keep=11).logits is not None
    assert isinstance(model(input_ids=ids, labels=labels, return_dict=False), tuple)
    model.eval()
    assert model(input_ids=ids, labels=labels).logits.shape == (2, 11, V)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 13)
    model.train()
    fused = model(input_ids=ids, labels=labels).loss
    assert torch.equal(model(ids, labels=labels).loss, fused)
    shifted = torch.cat((labels[:, 1:], torch.full((2, 1), -100)), 1)
    assert torch.allclose(model(ids, shift_labels=shifted).loss, fused)
    assert model(ids, labels=torch.full_like(labels, -100)).loss.item() == 0
    assert torch.allclose(unfuse_lm_head(model)(input_ids=ids, labels=labels).loss, fused)
    with pytest.raises(ValueError, match="is not fused"):
        unfuse_lm_head(model)


def test_options_reach_the_loss():
    model = tiny("llama")
    ids, labels = next(batches(1))
    plain = model(input_ids=ids, labels=labels)
    smoothed = torch.nn.functional.cross_entropy(
        plain.logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1), label_smoothing=0.1
    )
    assert torch.allclose(fuse_lm_head(model, label_smoothing=0.1)(input_ids=ids, labels=labels).loss, smoothed)


def test_a_head_that_does_something_unknown_is_refused():
    model = tiny("llama")
    own = model.lm_head.forward
    model.lm_head.forward = lambda h: own(h) * 1.5
    with pytest.raises(ValueError, match="does something that this function does not know"):
        fuse_lm_head(model)
    assert not hasattr(model, "_logitless_forward")
    moe = tiny("mixtral")
    moe.config.output_router_logits = True
    with pytest.raises(ValueError, match="router loss"):
        fuse_lm_head(moe)
    again = fuse_lm_head(tiny("llama"))
    with pytest.raises(ValueError, match="fused already"):
        fuse_lm_head(again)
