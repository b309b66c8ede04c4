"""The frameworks' contracts on one rank (group_worker.py has those of several), and against the real packages where
installed."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from conftest import Problem, reference, relative
from logitless.adapters import deepspeed, megatron, trl, verl


def parameters_of(package, file, function, owner=None):
    """Parameter names of a function in an installed package, read without importing it (most need a GPU's
    libraries)."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    path = Path(next(iter(spec.submodule_search_locations))) / file if spec else None
    if path is None or not path.exists():
        pytest.skip(f"{package} is not installed, or has no {file}")
    body = ast.parse(path.read_text()).body
    if owner:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner).body
    found = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
    return [a.arg for a in found.args.args if a.arg != "ctx"]


@pytest.mark.parametrize(
    "ours, package, file, function, owner",
    [
        (verl.linear_cross_entropy, "verl", "utils/kernel/linear_cross_entropy.py", "forward", "LinearCrossEntropy"),
        (trl.chunked_logprob, "trl", "kernels/chunked_logprob.py", "forward", "ChunkedLogProbFunction"),
        (
            deepspeed.vocab_parallel_linear_cross_entropy,
            "deepspeed",
            "sequence/linear_cross_entropy.py",
            "vocab_parallel_linear_cross_entropy",
            None,
        ),
        (
            deepspeed.vocab_parallel_cross_entropy,
            "deepspeed",
            "sequence/cross_entropy.py",
            "vocab_parallel_cross_entropy",
            None,
        ),
        (
            deepspeed.configure_vocab_parallel_loss,
            "deepspeed",
            "sequence/cross_entropy.py",
            "configure_vocab_parallel_loss",
            None,
        ),
        (
            megatron.fused_vocab_parallel_cross_entropy,
            "megatron",
            "core/fusions/fused_cross_entropy.py",
            "fused_vocab_parallel_cross_entropy",
            None,
        ),
    ],
    ids=["verl", "trl", "deepspeed linear", "deepspeed", "deepspeed configure", "megatron"],
)
def test_signatures_are_theirs(ours, package, file, function, owner):
    theirs = parameters_of(package, file, function, owner)
    mine = [p.name for p in inspect.signature(ours).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert mine == theirs


def test_megatrons_signature():
    """As in its development branch; no release has the file yet."""
    names = list(inspect.signature(megatron.linear_cross_entropy).parameters)
    assert names[:7] == ["hidden", "weight", "labels", "tp_group", "reduction", "ignore_index", "sequence_parallel"]


def test_megatron(device):
    p = Problem("f32:n24:d16:v60:ign", device)
    hidden, labels = p.x.view(6, 4, 16), p.target.view(6, 4)
    x, w, _ = p.double()
    for reduction, shape in (("none", (24,)), ("mean", ()), ("sum", ())):
        loss = megatron.linear_cross_entropy(hidden, p.w, labels, None, reduction)
        want = reference(x, w, None, p.target, reduction=reduction)[0]
        assert loss.shape == shape and relative(loss, want) < 1e-6
    main = torch.zeros(60, 16, device=device)
    megatron.linear_cross_entropy(hidden, p.w, labels, main_grad=main).backward()
    reference(x, w, None, p.target)[0].backward()
    assert relative(main, w.grad) < 1e-5 and relative(p.x.grad, x.grad) < 1e-5 and p.w.grad is None


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "MEAN"])
def test_verl(reduction, device):
    p = Problem("f32:n24:d16:v60", device)
    p.target[0] = 0  # no label is special
    logp, entropy = verl.linear_cross_entropy(p.x.view(2, 12, 16), p.w, p.target.view(2, 12), 0.7, reduction)
    x, w, _ = p.double()
    nll, _, want = reference(x, w, None, p.target, temperature=0.7, reduction="none")
    wanted = {"none": -nll, "sum": -nll.sum(), "mean": -nll.mean()}[reduction.lower()]
    assert logp.shape == wanted.shape and relative(logp, wanted) < 1e-6 and relative(entropy, want) < 1e-5
    (logp.sum() * 2 - entropy.square().sum()).backward()
    (wanted.sum() * 2 - want.square().sum()).backward()
    assert relative(p.x.grad, x.grad) < 1e-5 and relative(p.w.grad, w.grad) < 1e-5
    with pytest.raises(ValueError, match="avg"):
        verl.linear_cross_entropy(p.x, p.w, p.target, 1.0, "avg")


@pytest.mark.parametrize("shape", [(24,), (2, 12)])
def test_verls_own_torch_function_agrees(shape, device):
    """FusedLinearForPPO, what verl runs without its Triton kernel: values, gradients, temperature."""
    spec = importlib.util.find_spec("verl")  # read from its file: importing the package wants Ray
    if spec is None:
        pytest.skip("verl is not installed")
    path = Path(next(iter(spec.submodule_search_locations))) / "utils/experimental/torch_functional.py"
    spec = importlib.util.spec_from_file_location("verl_torch_functional", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs = module.FusedLinearForPPO(chunk_size=7)
    p = Problem("f32:n24:d16:v60", device)
    up = torch.linspace(-1, 2, 24, device=device).view(shape)
    found = []
    for call in (theirs, verl.linear_cross_entropy):
        x, w = p.x.detach().view(*shape, 16).clone().requires_grad_(), p.w.detach().clone().requires_grad_()
        logp, entropy = call(x, w, p.target.view(shape), 0.7)
        logp, entropy = logp.view(shape), entropy.view(shape)
        ((logp * up).sum() + (entropy * up.flip(0)).sum()).backward()
        found.append((logp, entropy, x.grad, w.grad))
    for a, b in zip(*found):
        assert relative(b, a) < 1e-5


def test_megatrons_signature_of_the_loss_over_logits():
    """Its released function names no group: the adapter's tp_group comes after what it has."""
    theirs = parameters_of("megatron", "core/tensor_parallel/cross_entropy.py", "vocab_parallel_cross_entropy")
    assert list(inspect.signature(megatron.vocab_parallel_cross_entropy).parameters)[: len(theirs)] == theirs


@pytest.mark.parametrize("scale, softcap", [(1.0, None), (0.25, None), (0.25, 3.0), (-0.5, None)])
def test_trl(scale, softcap, device):
    p = Problem("f32:n24:d16:v60:bias", device)
    logp, entropy, none, also_none, top1 = trl.chunked_logprob(p.x, p.w, p.bias, p.target, 0.8, 8192, softcap, scale)
    x, w, b = p.double()
    z = (x @ w.T + b) * scale
    z = (softcap * torch.tanh(z / softcap) if softcap else z) / 0.8
    want = torch.log_softmax(z, -1).gather(-1, p.target[:, None])[:, 0]
    wanted_entropy = -(torch.softmax(z, -1) * torch.log_softmax(z, -1)).sum(-1)
    assert relative(logp, want) < 1e-6 and relative(entropy, wanted_entropy) < 1e-5 and none is None is also_none
    assert torch.equal(top1, z.argmax(-1) == p.target)
    (logp.sum() + entropy.square().sum()).backward()
    (want.sum() + wanted_entropy.square().sum()).backward()
    for mine, theirs in zip(p.leaves(), (x, w, b)):
        assert relative(mine.grad, theirs.grad) < 1e-5
    with pytest.raises(ValueError, match="mean_logits"):
        trl.chunked_logprob(p.x, p.w, p.bias, p.target, 1.0, outputs=("mean_logits",))


def test_trl_trainers_use_it():
    """TRL's own patched model, before and after: the same log-probs, entropy, loss and gradients."""
    utils = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed")
    transformers = pytest.importorskip("transformers")
    if not hasattr(utils, "_ChunkedLogProbFunction"):
        pytest.skip("this TRL has no fused head")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    utils.add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy", "is_top1"))
    ids = torch.randint(3, 97, (2, 12))
    labels = ids.clone()
    labels[:, :4] = -100
    found = []
    before = utils._ChunkedLogProbFunction
    for use in (lambda: None, trl.use_in_trl):
        use()
        model.zero_grad()
        out = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (out.loss - 0.01 * out.entropy.sum()).backward()
        found.append(
            [out.loss, out.log_probs, out.entropy, out.is_top1.float(), *(p.grad.clone() for p in model.parameters())]
        )
    utils._ChunkedLogProbFunction = before
    for theirs, ours in zip(*found):
        assert relative(ours, theirs) < 1e-5


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_deepspeed_one_rank(reduction, device):
    p = Problem("f32:n24:d16:v60:bias:ign", device)
    hidden, target = p.x.view(2, 12, 16), p.target.view(2, 12)
    loss = deepspeed.vocab_parallel_linear_cross_entropy(hidden, p.w, target, p.bias, reduction=reduction, chunk_size=7)
    x, w, b = p.double()
    want = reference(x, w, b, p.target, reduction=reduction)[0]
    assert relative(loss.flatten(), want.flatten()) < 1e-6 and loss.shape == ((2, 12) if reduction == "none" else ())
    loss.sum().backward()
    want.sum().backward()
    for mine, theirs in zip(p.leaves(), (x, w, b)):
        assert relative(mine.grad, theirs.grad) < 1e-5


def test_deepspeed_refusals_and_nothing_valid(device):
    p = Problem("f32:n6:d16:v60", device)
    call = deepspeed.vocab_parallel_linear_cross_entropy
    for more, sentence in (
        ({"reduction": "avg"}, "avg"),
        ({"vocab_start_index": 0}, "together"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"vocab_start_index": 0, "vocab_end_index": 59}, "does not hold its shard"),
        ({"vocab_start_index": 1, "vocab_end_index": 61}, "shard|v_begin|v_local"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call(p.x, p.w, p.target, **more)
    loss = call(p.x, p.w, torch.full_like(p.target, -100))
    loss.backward()
    assert loss.item() == 0 and (p.x.grad == 0).all()


def test_deepspeeds_own_loss_over_logits_agrees():
    theirs = pytest.importorskip("deepspeed.sequence.cross_entropy", reason="DeepSpeed is not installed, or older")
    torch.manual_seed(1)
    for v, dtype in ((34, torch.float32), (35, torch.bfloat16), (35, torch.float16)):
        z = (torch.randn(2, 9, v) * 20).to(dtype).requires_grad_()
        y = torch.randint(0, v, (2, 9))
        y[0, :3] = -100
        for reduction in ("none", "sum", "mean"):
            found = []
            for call in (theirs.vocab_parallel_cross_entropy, deepspeed.vocab_parallel_cross_entropy):
                loss = call(z, y, reduction=reduction)
                found.append((loss, *torch.autograd.grad(loss.sum(), z)))
            assert found[0][0].shape == found[1][0].shape
            assert relative(found[1][0], found[0][0]) < 1e-6
            assert relative(found[1][1], found[0][1]) < (1e-5 if dtype == torch.float32 else 4e-3)
        for more in ({"labels": y}, {"shift_labels": y}, {"labels": y, "num_items_in_batch": 30}):
            mine, other = (
                module.VocabParallelCausalLMLoss()(logits=z, vocab_size=v, **more) for module in (deepspeed, theirs)
            )
            assert relative(mine, other) < 1e-6
    with pytest.raises(ValueError, match="labels"):
        deepspeed.VocabParallelCausalLMLoss()(z)
    loss = deepspeed.VocabParallelCausalLMLoss()
    loss(z, y)
    with pytest.raises(RuntimeError, match="shard changed"):
        loss(z[..., :30], y.clamp(max=29))
    for more, sentence in (
        ({"backend": "fast"}, "fast"),
        ({"gather_sequence_loss": True}, "gather_sequence_loss"),
        ({"global_vocab_size": 35}, "global_vocab_size"),
    ):
        with pytest.raises(ValueError, match=sentence):
            deepspeed.vocab_parallel_cross_entropy(z, y, **more)


def test_deepspeeds_hook_on_a_model():
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=35, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    ids = torch.randint(0, 35, (2, 8))
    want = model(input_ids=ids, labels=ids).loss

    class Head:
        mp_group, vocab_start_index, vocab_end_index = None, 0, 35

    deepspeed.configure_vocab_parallel_loss(model, Head)
    assert torch.allclose(model(input_ids=ids, labels=ids).loss, want, rtol=1e-6)
    assert model._deepspeed_original_loss_function is not model.loss_function
    with pytest.raises(ValueError, match="no loss_function"):
        deepspeed.configure_vocab_parallel_loss(object(), Head)


def test_megatrons_losses_over_logits():
    """B41, B43: smoothing over the V - 1 others of the whole vocabulary; in place as its fused loss."""
    torch.manual_seed(2)
    z = torch.zeros(1, 1, 8)
    z[0, 0, 0] = 2
    loss = megatron.vocab_parallel_cross_entropy(z, torch.zeros(1, 1, dtype=torch.int64), 0.1)
    assert loss.shape == (1, 1) and abs(loss.item() - 0.866468) < 1e-6
    z = torch.randn(4, 3, 20, requires_grad=True)
    y = torch.randint(0, 20, (4, 3))
    held = z * 1
    fused = megatron.fused_vocab_parallel_cross_entropy(held, y, None)
    want = torch.nn.functional.cross_entropy(z.view(12, 20), y.view(12), reduction="none").view(4, 3)
    assert torch.allclose(fused, want, atol=1e-6)
    up = torch.randn(4, 3)
    got, wanted = torch.autograd.grad(fused, z, up)[0], torch.autograd.grad(want, z, up)[0]
    assert torch.allclose(got, wanted, atol=1e-6) and torch.allclose(held, wanted, atol=1e-6)


def test_deepspeeds_own_function_agrees():
    theirs = pytest.importorskip(
        "deepspeed.sequence.linear_cross_entropy", reason="DeepSpeed is not installed, or older"
    )
    p = Problem("f32:n24:d16:v60:bias:ign", "cpu")
    for reduction in ("none", "sum", "mean"):
        for call in (theirs.vocab_parallel_linear_cross_entropy, deepspeed.vocab_parallel_linear_cross_entropy):
            for t in p.leaves():
                t.grad = None
            loss = call(p.x, p.w, p.target, p.bias, reduction=reduction)
            loss.sum().backward()
            found = [loss, *(t.grad.clone() for t in p.leaves())]
            if call is theirs.vocab_parallel_linear_cross_entropy:
                wanted = found
        for mine, want in zip(found, wanted):
            assert relative(mine, want) < 1e-5
