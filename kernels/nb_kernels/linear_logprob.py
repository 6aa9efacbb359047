"""Log-probability of target tokens straight from hidden states; the logits never exist as a whole.

    z_tv = hidden_t . weight_v / temperature          lse_t = log sum_v exp z_tv          p_tv = exp(z_tv - lse_t)
    logprob_t = z_t,target - lse_t                    entropy_t = lse_t - sum_v p_tv z_tv

Backward, with g = dLoss/dlogprob and e = dLoss/dentropy:
    dLoss/dz_tv = g_t (1[v = target_t] - p_tv) - e_t p_tv (log p_tv + entropy_t)
    dhidden = dz @ weight / temperature,   dweight = dz^T @ hidden / temperature

Shapes: T packed tokens, H hidden, V rows of `weight` on this rank. hidden [T, H], weight [V, H], targets [T].
Cost: 2 T V H forward, 6 T V H backward (4 when gradients are formed in the forward pass, which computes logits once).
Accumulators are float32, or float64 for float64 inputs, also across chunks.
Chunked losses: Hsu et al. 2024 (arXiv:2410.10989), Wijmans et al. 2024 (arXiv:2411.09009).
"""
from __future__ import annotations

import math

import torch
import torch.distributed as dist

TOKEN_CHUNK, VOCAB_CHUNK = 512, 8192  # logits computed at once by the torch path when they are needed twice
ONE_PASS_LOGITS = 1 << 24  # logits kept at once when `coefficient` lets the torch path compute them only once


def reference(hidden, weight, targets, temperature=1.0, vocab_size=None, ignore_index=-100):
    """The definition with whole logits in the inputs' own dtype -> (logprob [T], entropy [T]); tests call it in float64."""
    logits = hidden @ weight[:vocab_size].T / temperature  # [T, V]
    log_p = torch.log_softmax(logits, -1)
    kept = targets != ignore_index
    logprob = log_p.gather(1, targets.where(kept, 0)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return logprob.where(kept, 0), entropy.where(kept, 0)


def linear_logprob(
    hidden,
    weight,
    targets,
    *,
    temperature=1.0,
    vocab_size=None,
    group=None,
    reduce_hidden_grad=True,
    ignore_index=-100,
    entropy=False,
    coefficient=None,
    implementation="auto",
):
    """hidden [T, H], weight [V, H], targets [T] int64 -> logprob [T], or (logprob [T], entropy [T]).

    Results are float32 (float64 for float64 inputs). Both are differentiable in hidden and weight.
    temperature         divides the logits; a run-time number.
    vocab_size          true size of the whole vocabulary; rows beyond it are padding and never count.
    group               process group over which the vocabulary is split evenly, in rank order; targets are global ids.
    reduce_hidden_grad  sum dhidden over `group`; False where another operator does (the gather of sequence parallelism).
    ignore_index        such a target gives logprob 0, entropy 0 and no gradient.
    coefficient         [T], the caller's promise that dLoss/dlogprob = s * coefficient for one scalar s. Gradients are then
                        formed in the forward pass, which saves a quarter of the work. The entropy is then a metric only.
                        A broken promise raises in backward.
    implementation      "auto" (triton on CUDA, torch elsewhere), "torch", "triton".

    Raises ValueError for shapes, types, devices, layouts and targets that do not fit.
    """
    first, valid, total = _vocabulary_range(weight, vocab_size, group)
    _check(hidden, weight, targets, temperature, total, ignore_index, coefficient)
    if implementation not in ("auto", "torch", "triton"):
        raise ValueError(f"implementation={implementation!r} must be 'auto', 'torch' or 'triton'")
    if implementation == "triton":
        raise NotImplementedError("the triton path is not built yet; use implementation='torch'")
    setting = _Setting(float(temperature), first, valid, group, reduce_hidden_grad)
    kept = None
    if bool((targets == ignore_index).any()):
        kept = (targets != ignore_index).nonzero()[:, 0]
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if coefficient is not None and learns:
        coefficient = coefficient.detach().to(_accumulator(hidden.dtype))
        logprob, ent = _OnePass.apply(hidden, weight, targets, kept, coefficient, entropy, setting)
    else:
        logprob, ent = _TwoPass.apply(hidden, weight, targets, kept, entropy, setting)
    return (logprob, ent) if entropy else logprob


class _Setting:
    """What does not change between the passes: temperature, this rank's vocabulary [first, first + valid), group."""

    def __init__(self, temperature, first, valid, group, reduce_hidden_grad):
        self.temperature, self.first, self.valid = temperature, first, valid
        self.group, self.reduce_hidden_grad = group, reduce_hidden_grad


def _accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _vocabulary_range(weight, vocab_size, group):
    """(first global id on this rank, number of true rows here, true size of the whole vocabulary)."""
    world, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    rows = weight.shape[0]
    total = rows * world if vocab_size is None else int(vocab_size)
    if not 0 < total <= rows * world:
        raise ValueError(f"vocab_size={total} must be in [1, {rows * world}]: {rows} weight rows on each of {world} ranks")
    return rank * rows, min(max(total - rank * rows, 0), rows), total


def _check(hidden, weight, targets, temperature, total, ignore_index, coefficient):
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [T, H] and [V, H] with one H")
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}: both must have one floating dtype")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets {tuple(targets.shape)} {targets.dtype} must be [{len(hidden)}] int64, one per hidden row")
    if not hidden.device == weight.device == targets.device:
        places = f"hidden on {hidden.device}, weight on {weight.device}, targets on {targets.device}"
        raise ValueError(f"{places}: move them to one device")
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}: pass {name}.contiguous()")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature} must be a finite number above 0")
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= total))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"targets[{at}]={int(targets[at])} is outside [0, {total}) and is not ignore_index={ignore_index}: "
            "shift and mask targets before the loss"
        )
    if coefficient is not None and (coefficient.shape != targets.shape or coefficient.device != hidden.device):
        raise ValueError(
            f"coefficient {tuple(coefficient.shape)} on {coefficient.device} must be [{hidden.shape[0]}] on {hidden.device}"
        )


# ---------------------------------------------------------------------------------------------- torch, logits computed twice


class _TwoPass(torch.autograd.Function):
    """Forward keeps only row statistics; backward computes the logits again, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, kept, entropy, setting):
        logprob, ent, lse = _torch_forward(hidden, weight, targets, kept, entropy, setting)
        ctx.save_for_backward(hidden, weight, targets, kept, lse, ent)
        ctx.setting = setting
        ctx.set_materialize_grads(False)
        return logprob, ent

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, e):
        hidden, weight, targets, kept, lse, ent = ctx.saved_tensors
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        dhidden, dweight = _torch_backward(
            hidden, weight, targets, kept, lse, ent, g, e, ctx.setting, want_hidden, want_weight
        )
        return dhidden, dweight, None, None, None, None


def _rows(kept, T, size):
    """Slices of all rows, or pieces of the index of kept rows."""
    if kept is None:
        return [slice(i, min(i + size, T)) for i in range(0, T, size)]
    return list(kept.split(size)) if len(kept) else []


def _scaled(hidden, rows, setting, dtype):
    """hidden[rows] / temperature in the accumulator's dtype: z and dweight both need it."""
    chunk = hidden[rows].to(dtype)
    return chunk if setting.temperature == 1.0 else chunk / setting.temperature


def _target_columns(targets, rows, setting):
    """(rows within the chunk whose target lives on this rank, its local column)."""
    local = targets[rows] - setting.first
    here = ((local >= 0) & (local < setting.valid)).nonzero()[:, 0]
    return here, local[here]


def _torch_forward(hidden, weight, targets, kept, entropy, setting):
    T, dtype = hidden.shape[0], _accumulator(hidden.dtype)
    logprob = hidden.new_zeros(T, dtype=dtype)
    lse = hidden.new_zeros(T, dtype=dtype)
    ent = hidden.new_zeros(T, dtype=dtype) if entropy else None
    n, c = max(1, min(TOKEN_CHUNK, T)), min(VOCAB_CHUNK, max(setting.valid, 1))
    logits, spare = hidden.new_empty(n * c, dtype=dtype), hidden.new_empty(n * c if entropy else 0, dtype=dtype)
    count = T if kept is None else len(kept)
    stats = hidden.new_zeros(4, count, dtype=dtype)  # maximum, sum of e^(z - max), sum of e^(z - max) (z - max), target's z
    stats[0] = -math.inf
    done = 0
    for rows in _rows(kept, T, n):
        h = _scaled(hidden, rows, setting, dtype)
        size = len(h)
        m, l, s, zt = stats[:, done : done + size]
        done += size
        at, column = _target_columns(targets, rows, setting)
        for v in range(0, setting.valid, c):
            w = weight[v : min(v + c, setting.valid)].to(dtype)
            z = logits[: size * len(w)].view(size, len(w))
            torch.mm(h, w.T, out=z)
            inside = (column >= v) & (column < v + len(w))
            zt[at[inside]] = z[at[inside], column[inside] - v]
            new = torch.maximum(m, z.amax(1))
            decay = (m - new).exp_()
            z.sub_(new[:, None])
            if entropy:
                p = spare[: z.numel()].view_as(z)
                torch.exp(z, out=p)
                # the old sum is about the old maximum; -inf * 0 of the first chunk must not make it NaN
                s.add_(l * (m - new).clamp_(min=-1e30)).mul_(decay).add_(z.mul_(p).sum(1))
            else:
                p = z.exp_()
            l.mul_(decay).add_(p.sum(1))
            m.copy_(new)
    m, l, s, zt = _merge(stats, setting.group)
    where = slice(None) if kept is None else kept
    log_l = l.log()
    logprob[where] = (zt - m) - log_l
    lse[where] = m + log_l
    if entropy:
        ent[where] = log_l - s / l
    return logprob, ent, lse


def _merge(stats, group):
    """Row statistics [4, n] of this rank -> of the whole vocabulary. A rank of padding alone brings maximum -inf, sum 0."""
    if group is None:
        return stats
    m, l, s, zt = stats
    whole = m.clone()
    dist.all_reduce(whole, dist.ReduceOp.MAX, group)
    shift = (m - whole).clamp_(min=-1e30)  # finite, so that 0 * shift is 0
    decay = shift.exp()
    sums = torch.stack([l * decay, (s + l * shift) * decay, zt])
    dist.all_reduce(sums, group=group)
    return whole, *sums


def _torch_backward(hidden, weight, targets, kept, lse, ent, g, e, setting, want_hidden, want_weight):
    T, dtype = hidden.shape[0], _accumulator(hidden.dtype)
    dhidden = torch.zeros_like(hidden) if want_hidden else None
    dweight = torch.zeros_like(weight, dtype=dtype) if want_weight else None
    if g is None:
        g = torch.zeros_like(lse)
    if setting.group is None:  # rows without gradient need no work; with a group all ranks must agree, so targets alone decide
        active = g != 0 if e is None else (g != 0) | (e != 0)
        if kept is not None:
            kept = kept[active[kept]]
        elif not bool(active.all()):
            kept = active.nonzero()[:, 0]
    n, c = max(1, min(TOKEN_CHUNK, T)), min(VOCAB_CHUNK, max(setting.valid, 1))
    logits = hidden.new_empty(n * c, dtype=dtype)
    spare = hidden.new_empty(n * c if e is not None else 0, dtype=dtype)
    for rows in _rows(kept, T, n):
        h = _scaled(hidden, rows, setting, dtype)
        size, gr = len(h), g[rows].to(dtype)[:, None]
        dh = torch.zeros_like(h) if want_hidden else None
        at, column = _target_columns(targets, rows, setting)
        for v in range(0, setting.valid, c):
            w = weight[v : min(v + c, setting.valid)].to(dtype)
            dz = logits[: size * len(w)].view(size, len(w))
            torch.mm(h, w.T, out=dz)
            dz.sub_(lse[rows][:, None])  # log p
            if e is None:
                dz.exp_().mul_(-gr)
            else:
                er = e[rows].to(dtype)[:, None]
                p = spare[: dz.numel()].view_as(dz)
                torch.exp(dz, out=p)
                dz.mul_(-er).sub_(gr + er * ent[rows][:, None]).mul_(p)
            inside = (column >= v) & (column < v + len(w))
            dz[at[inside], column[inside] - v] += gr[at[inside], 0]
            if want_hidden:
                dh.addmm_(dz, w)
            if want_weight:
                dweight[v : v + len(w)].addmm_(dz.T, h)
        if want_hidden:
            dhidden[rows] = _reduced(dh.div_(setting.temperature), setting).to(hidden.dtype)
    return dhidden, dweight.to(weight.dtype) if want_weight else None


def _reduced(dh, setting):
    if setting.group is not None and setting.reduce_hidden_grad:
        dist.all_reduce(dh, group=setting.group)
    return dh


# ------------------------------------------------------------------------------------------------ torch, logits computed once


class _OnePass(torch.autograd.Function):
    """With dLoss/dlogprob promised up to a scalar, each chunk's gradients are formed while its logits exist."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, kept, coefficient, entropy, setting):
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        ctx.set_materialize_grads(False)
        logprob, ent, ctx.dhidden, ctx.dweight = _torch_one_pass(
            hidden, weight, targets, kept, coefficient, entropy, setting, want_hidden, want_weight
        )
        ctx.save_for_backward(kept, coefficient)
        if entropy:
            ctx.mark_non_differentiable(ent)
        return logprob, ent

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, _):
        kept, coefficient = ctx.saved_tensors
        if g is None:
            return (None,) * 7
        scalar = _promised_scalar(g, coefficient, kept)
        dhidden, dweight = ctx.dhidden, ctx.dweight
        if dhidden is None and dweight is None:
            raise ValueError("second backward through linear_logprob(coefficient=...): its gradients exist once; call it again")
        ctx.dhidden = ctx.dweight = None
        if scalar != 1.0:
            dhidden = dhidden.mul_(scalar) if dhidden is not None else None
            dweight = dweight.mul_(scalar) if dweight is not None else None
        return dhidden, dweight, None, None, None, None, None


def _promised_scalar(g, coefficient, kept):
    """s with g = s * coefficient on the kept rows, or ValueError."""
    rows = slice(None) if kept is None else kept
    g, c = g[rows].double(), coefficient[rows].double()
    norm = (c * c).sum()
    s = float((g * c).sum() / norm) if norm > 0 else 1.0
    error, bound = float((g - s * c).abs().max()) if len(g) else 0.0, 1e-5 * float(g.abs().max()) if len(g) else 0.0
    if not error <= bound:
        raise ValueError(
            f"dLoss/dlogprob differs from s * coefficient by {error:.3g} (s = {s:.6g}, largest gradient {bound * 1e5:.3g}): "
            "the loss must be s * (coefficient . logprob); leave coefficient out for any other loss"
        )
    return s


def _torch_one_pass(hidden, weight, targets, kept, coefficient, entropy, setting, want_hidden, want_weight):
    T, dtype, V = hidden.shape[0], _accumulator(hidden.dtype), setting.valid
    logprob = hidden.new_zeros(T, dtype=dtype)
    ent = hidden.new_zeros(T, dtype=dtype) if entropy else None
    dhidden = torch.zeros_like(hidden) if want_hidden else None
    dweight = torch.zeros_like(weight, dtype=dtype) if want_weight else None
    n = max(1, min(T, TOKEN_CHUNK, ONE_PASS_LOGITS // max(V, 1)))
    buffer = hidden.new_empty(n * V, dtype=dtype)
    for rows in _rows(kept, T, n):
        h = _scaled(hidden, rows, setting, dtype)
        size = len(h)
        z = buffer[: size * V].view(size, V)
        _matmul_rows(h, weight[:V], z)
        at, column = _target_columns(targets, rows, setting)
        stats = h.new_zeros(4, size)
        stats[0] = z.amax(1) if V else -math.inf
        stats[3, at] = z[at, column]
        if setting.group is not None:
            dist.all_reduce(stats[0], dist.ReduceOp.MAX, setting.group)
        m, l, s, zt = stats
        for i in range(0, size, 16):  # 16 rows stay in cache between the two passes
            part = z[i : i + 16].sub_(m[i : i + 16, None])
            if entropy:
                s[i : i + 16] = (part * part.exp()).sum(1)
            torch.sum(part.exp_(), 1, out=l[i : i + 16])
        if setting.group is not None:
            dist.all_reduce(stats[1:], group=setting.group)
        log_l = l.log()
        logprob[rows] = (zt - m) - log_l
        if entropy:
            ent[rows] = log_l - s / l
        # z holds e^(z - m) = p l; with the target's l taken off, dz = z * (-coefficient / l), and that factor moves to the rows
        z[at, column] -= l[at]
        factor = (coefficient[rows] / l).neg_()[:, None]
        if want_hidden:
            dh = h.new_zeros(size, hidden.shape[1])
            for v in range(0, V, VOCAB_CHUNK):
                w = weight[v : min(v + VOCAB_CHUNK, V)].to(dtype)
                dh.addmm_(z[:, v : v + len(w)], w)
            dh.mul_(factor / setting.temperature)
            dhidden[rows] = _reduced(dh, setting).to(hidden.dtype)
        if want_weight:
            dweight[:V].addmm_(z.T, h * factor)
    return logprob, ent, dhidden, dweight.to(weight.dtype) if want_weight else None


def _matmul_rows(h, weight, z):
    """z = h @ weight^T, in the dtype of h; weights of another dtype are converted a chunk at a time."""
    if weight.dtype == h.dtype:
        torch.mm(h, weight.T, out=z)
        return
    for v in range(0, len(weight), VOCAB_CHUNK):
        w = weight[v : v + VOCAB_CHUNK].to(h.dtype)
        torch.mm(h, w.T, out=z[:, v : v + len(w)])
