"""The C library by ctypes, as far as the benchmarks need it: one plan, one workspace, three passes, two operations.

The structs mirror include/logitless/logitless.h of version 0.1 field by field; the library itself refuses
a struct_bytes that it does not know, and Library refuses another version. Memory is borrowed from torch
tensors (any object with data_ptr, shape, stride and dtype will do). This is no Python interface of
logitless: no autograd, few checks, no options of the loss.
"""
import ctypes as c

DTYPES = {"f32": 1, "bf16": 2, "f16": 3, "i32": 4, "i64": 5}
_TORCH_NAMES = {"torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16",
                "torch.int32": "i32", "torch.int64": "i64"}
PASSES = {"forward": 0, "backward": 1, "forward_backward": 2}
STATUS_WORKSPACE = 3
FROZEN_BIAS = 4
OP_CE = 1
BACKEND_CUDA = 3  # tensors are then on the GPU that is current when the plan is made


class View(c.Structure):
    _fields_ = [("data", c.c_void_p), ("rows", c.c_int64), ("cols", c.c_int64), ("row_stride", c.c_int64),
                ("col_stride", c.c_int64), ("dtype", c.c_int32), ("reserved", c.c_int32)]


class PlanDesc(c.Structure):
    _fields_ = [("struct_bytes", c.c_size_t), ("op", c.c_int32), ("backend", c.c_int32),
                ("n_tokens_max", c.c_int64), ("n_hidden", c.c_int64), ("v_begin", c.c_int64),
                ("v_local", c.c_int64), ("v_total", c.c_int64), ("x_dtype", c.c_int32), ("w_dtype", c.c_int32),
                ("bias_dtype", c.c_int32), ("grad_x_dtype", c.c_int32), ("grad_w_dtype", c.c_int32),
                ("grad_bias_dtype", c.c_int32), ("frozen", c.c_int32), ("n_threads", c.c_int32),
                ("workspace_budget_bytes", c.c_size_t), ("loss", c.c_void_p), ("comm", c.c_void_p),
                ("logits_dtype", c.c_int32), ("grad_logits_dtype", c.c_int32), ("n_ids", c.c_int32),
                ("n_top", c.c_int32)]


class LinearCeArgs(c.Structure):
    _fields_ = ([("struct_bytes", c.c_size_t)]
                + [(name, View) for name in ("x", "w", "bias", "target")]
                + [(name, c.c_void_p) for name in
                   ("class_weight", "token_weight", "divisor", "loss", "nll", "lse", "lse_lo", "entropy",
                    "z_loss", "argmax", "sums", "up_loss", "up_nll", "up_lse", "up_entropy")]
                + [(name, View) for name in ("grad_x", "grad_w", "grad_bias")]
                + [("accumulate", c.c_int32), ("reserved", c.c_int32), ("workspace", c.c_void_p),
                   ("workspace_bytes", c.c_size_t), ("bad_targets", c.c_void_p)])


class CeState(c.Structure):
    _fields_ = [("struct_bytes", c.c_size_t), ("logits", c.c_void_p), ("n_tokens", c.c_int64), ("intact", c.c_int32),
                ("reserved", c.c_int32)]


class CeArgs(c.Structure):
    _fields_ = ([("struct_bytes", c.c_size_t), ("logits", View), ("target", View)]
                + [(name, c.c_void_p) for name in
                   ("class_weight", "token_weight", "divisor", "loss", "nll", "lse", "lse_lo", "entropy",
                    "z_loss", "argmax", "sums", "up_loss", "up_nll", "up_lse", "up_entropy")]
                + [("grad_logits", View), ("in_place", c.c_int32), ("reserved", c.c_int32),
                   ("state", c.POINTER(CeState)), ("ids", View)]
                + [(name, c.c_void_p) for name in ("id_logp", "id_rank", "top_ids", "top_logp", "workspace")]
                + [("workspace_bytes", c.c_size_t), ("bad_targets", c.c_void_p)])


class Error(RuntimeError):
    """A call that failed: ll_last_error's sentence; `status` is the number of the ll_status."""

    def __init__(self, status, sentence):
        super().__init__(sentence)
        self.status = status


def dtype_of(tensor):
    return DTYPES[_TORCH_NAMES[str(tensor.dtype)]]


def view(tensor):
    """View of a matrix with contiguous rows, or of a vector."""
    stride = tensor.stride()
    if tensor.dim() == 1:
        return View(tensor.data_ptr(), tensor.shape[0], 1, stride[0], 1, dtype_of(tensor), 0)
    return View(tensor.data_ptr(), tensor.shape[0], tensor.shape[1], stride[0], stride[1], dtype_of(tensor), 0)


class Library:
    def __init__(self, path):
        lib = self.lib = c.CDLL(path)
        for name in ("ll_version", "ll_last_error", "ll_plan_kernel", "ll_plan_numerics"):
            getattr(lib, name).restype = c.c_char_p
        lib.ll_plan_create.argtypes = [c.POINTER(PlanDesc), c.POINTER(c.c_void_p)]
        lib.ll_plan_workspace.argtypes = [c.c_void_p, c.c_int, c.POINTER(c.c_size_t)]
        lib.ll_plan_describe.argtypes = [c.c_void_p, c.c_char_p, c.c_size_t]
        for name in ("ll_plan_destroy", "ll_plan_kernel", "ll_plan_numerics", "ll_plan_threads"):
            getattr(lib, name).argtypes = [c.c_void_p]
        lib.ll_plan_destroy.restype = None
        lib.ll_plan_threads.restype = c.c_int32
        for name in PASSES:
            getattr(lib, "ll_linear_ce_" + name).argtypes = [c.c_void_p, c.POINTER(LinearCeArgs), c.c_void_p]
            getattr(lib, "ll_ce_" + name).argtypes = [c.c_void_p, c.POINTER(CeArgs), c.c_void_p]
        self.version = lib.ll_version().decode()
        if not self.version.startswith("0.1."):
            raise RuntimeError(f"{path}: found logitless {self.version}, wanted 0.1 (bench/ll_ctypes.py)")

    def check(self, status):
        if status != 0:
            raise Error(status, self.lib.ll_last_error().decode())


class BasePlan:
    """What plans of both operations have in common."""

    def __init__(self, library, operation, desc):
        self.library, self.operation, self.handle = library, operation, c.c_void_p()
        library.check(library.lib.ll_plan_create(c.byref(desc), c.byref(self.handle)))
        self.kernel = library.lib.ll_plan_kernel(self.handle).decode()
        self.numerics = library.lib.ll_plan_numerics(self.handle).decode()
        self.n_threads = library.lib.ll_plan_threads(self.handle)

    def describe(self):
        text = c.create_string_buffer(4096)
        self.library.check(self.library.lib.ll_plan_describe(self.handle, text, len(text)))
        return text.value.decode()

    def workspace_bytes(self, pass_name):
        size = c.c_size_t()
        self.library.check(self.library.lib.ll_plan_workspace(self.handle, PASSES[pass_name], c.byref(size)))
        return size.value

    def run(self, pass_name, args):
        call = getattr(self.library.lib, f"ll_{self.operation}_{pass_name}")
        self.library.check(call(self.handle, c.byref(args), None))

    def close(self):
        self.library.lib.ll_plan_destroy(self.handle)
        self.handle = c.c_void_p()


class Plan(BasePlan):
    """Plan without bias for x [n_tokens, n_hidden] and w [vocabulary, n_hidden], mean loss."""

    def __init__(self, library, x, w, grad_dtype=None, n_threads=0, budget_bytes=0, grad_w_dtype=None, backend=0):
        grad = DTYPES[grad_dtype] if grad_dtype else 0
        grad_w = DTYPES[grad_w_dtype] if grad_w_dtype else grad
        desc = PlanDesc(struct_bytes=c.sizeof(PlanDesc), backend=backend, n_tokens_max=x.shape[0], n_hidden=x.shape[1],
                        v_local=w.shape[0], v_total=w.shape[0], x_dtype=dtype_of(x), w_dtype=dtype_of(w),
                        grad_x_dtype=grad, grad_w_dtype=grad_w, frozen=FROZEN_BIAS, n_threads=n_threads,
                        workspace_budget_bytes=budget_bytes)
        super().__init__(library, "linear_ce", desc)


class CePlan(BasePlan):
    """Plan for logits [n_tokens, vocabulary] that the caller has, mean loss."""

    def __init__(self, library, logits, n_threads=0, backend=0):
        desc = PlanDesc(struct_bytes=c.sizeof(PlanDesc), op=OP_CE, backend=backend, n_tokens_max=logits.shape[0],
                        v_local=logits.shape[1], v_total=logits.shape[1], n_threads=n_threads,
                        logits_dtype=dtype_of(logits))
        super().__init__(library, "ce", desc)


def linear_ce_args(x, w, target, workspace, grads=None, **pointers):
    """Arguments of a call; grads = (grad_x, grad_w); pointers: tensors named as the fields."""
    args = LinearCeArgs(struct_bytes=c.sizeof(LinearCeArgs), x=view(x), w=view(w), target=view(target),
                        workspace=workspace.data_ptr(), workspace_bytes=workspace.numel())
    if grads:
        args.grad_x, args.grad_w = view(grads[0]), view(grads[1])
    for name, tensor in pointers.items():
        setattr(args, name, tensor.data_ptr())
    return args


def ce_args(logits, target, workspace, grad_logits=None, state=None, **pointers):
    """Arguments of a call over given logits; state: a CeState, for a gradient that goes over them."""
    args = CeArgs(struct_bytes=c.sizeof(CeArgs), logits=view(logits), target=view(target),
                  workspace=workspace.data_ptr(), workspace_bytes=workspace.numel())
    if grad_logits is not None:
        args.grad_logits = view(grad_logits)
        args.in_place = int(state is not None)
    if state is not None:
        args.state = c.pointer(state)
    for name, tensor in pointers.items():
        setattr(args, name, tensor.data_ptr())
    return args
