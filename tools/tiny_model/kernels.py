"""Three operations of the training model with hand-written gradients.

PyTorch's own composition of them is bound by memory traffic on a CPU: the vocabulary-wide logits
alone would be 64 MiB a step, read and written several times. Here logits exist for one chunk of
rows at a time, and a mixture of experts is two sorted passes of small matrix products.

Letters in names: N rows (tokens), H hidden, V vocabulary, E experts, K experts per token,
I expert width, P passes of the MTP module, B sequences, L tokens of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -1
_CHUNK_ROWS = 256


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        weights_NK: Tensor,
        experts_NK: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        num_rows, top_k = experts_NK.shape
        order = experts_NK.flatten().argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        counts = torch.bincount(experts_NK.flatten(), minlength=len(gate_up)).tolist()
        rows = order // top_k

        x_sorted = x_NH.index_select(0, rows)
        gate_up_out = x_NH.new_empty(len(order), gate_up.shape[1])
        for part, weight, out in _segments(counts, gate_up, x_sorted, gate_up_out):
            torch.mm(part, weight.t(), out=out)
        gate, up = gate_up_out.chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate).mul_(up)
        y_sorted = x_NH.new_empty(len(order), down.shape[1])
        for part, weight, out in _segments(counts, down, activated, y_sorted):
            torch.mm(part, weight.t(), out=out)

        y_NKH = y_sorted.index_select(0, inverse).view(num_rows, top_k, -1)
        ctx.save_for_backward(
            x_sorted, gate_up_out, activated, y_NKH, weights_NK, gate_up, down, order, inverse
        )
        ctx.counts = counts
        return torch.bmm(weights_NK.unsqueeze(1), y_NKH).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad_NH,) = grad_outputs
        (x_sorted, gate_up_out, activated, y_NKH, weights_NK, gate_up, down, order, inverse) = (
            ctx.saved_tensors
        )
        num_rows, top_k = weights_NK.shape
        grad_weights = torch.bmm(y_NKH, grad_NH.unsqueeze(2)).squeeze(2)
        grad_y = grad_NH.index_select(0, order // top_k)
        grad_y.mul_(weights_NK.flatten().index_select(0, order).unsqueeze(1))

        grad_activated = torch.empty_like(activated)
        grad_down = torch.empty_like(down)
        for part, weight, out in _segments(ctx.counts, down, grad_y, grad_activated):
            torch.mm(part, weight, out=out)
        for part, other, out in _segment_pairs(ctx.counts, grad_y, activated, grad_down):
            torch.mm(part.t(), other, out=out)

        gate, up = gate_up_out.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up_out)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad_activated, torch.nn.functional.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad_activated.mul_(up), gate))

        grad_x_sorted = torch.empty_like(x_sorted)
        grad_w_gate_up = torch.empty_like(gate_up)
        for part, weight, out in _segments(ctx.counts, gate_up, grad_gate_up, grad_x_sorted):
            torch.mm(part, weight, out=out)
        for part, other, out in _segment_pairs(ctx.counts, grad_gate_up, x_sorted, grad_w_gate_up):
            torch.mm(part.t(), other, out=out)
        grad_x = grad_x_sorted.index_select(0, inverse).view(num_rows, top_k, -1).sum(1)
        return grad_x, grad_weights, None, grad_w_gate_up, grad_down


def routed_experts(
    x_NH: Tensor, weights_NK: Tensor, experts_NK: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """`sum_k weights[n, k] * expert_{experts[n, k]}(x[n])`, shape [N, H].

    `gate_up` is [E, 2I, H] (gate rows first), `down` is [E, H, I]. Every row is computed: there is
    no capacity and nothing is dropped, as at inference.
    """
    return _RoutedExperts.apply(x_NH, weights_NK, experts_NK, gate_up, down)


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_NH: Tensor, head_VH: Tensor, targets_N: Tensor) -> Tensor:
        num_targets = max(int((targets_N != IGNORE).sum()), 1)
        loss = z_NH.new_zeros(())
        grad_z = torch.empty_like(z_NH)
        grad_head = torch.zeros_like(head_VH) if ctx.needs_input_grad[1] else None
        for start in range(0, len(z_NH), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            target = targets_N[rows].clamp(min=0).unsqueeze(1)
            weight = (targets_N[rows] != IGNORE).to(z_NH.dtype).unsqueeze(1) / num_targets
            probs = torch.softmax(z_NH[rows] @ head_VH.t(), dim=-1)
            picked = probs.gather(1, target)
            loss -= (picked.clamp_min(1e-30).log() * weight).sum()
            grad = probs.scatter_(1, target, picked - 1).mul_(weight)
            torch.mm(grad, head_VH, out=grad_z[rows])
            if grad_head is not None:
                grad_head.addmm_(grad.t(), z_NH[rows])
        ctx.save_for_backward(grad_z, grad_head)
        return loss

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad_loss,) = grad_outputs
        grad_z, grad_head = ctx.saved_tensors
        return grad_z * grad_loss, None if grad_head is None else grad_head * grad_loss, None


def head_cross_entropy(z_NH: Tensor, head_VH: Tensor, targets_N: Tensor) -> Tensor:
    """Mean cross entropy (nats) of `z @ head.T` over the rows whose target is not `IGNORE`."""
    return _HeadCrossEntropy.apply(z_NH, head_VH, targets_N)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z_PBLH: Tensor,
        h_BSH: Tensor,
        head_VH: Tensor,
        valid_PBL: Tensor,
        pass_weights: tuple[float, ...],
        argmax_share: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_passes, _, length, _ = z_PBLH.shape
        num_valid = valid_PBL.sum((1, 2)).clamp_min(1).to(z_PBLH.dtype)
        loss = z_PBLH.new_zeros(())
        agreement = z_PBLH.new_zeros(num_passes)
        overlap = z_PBLH.new_zeros(num_passes)
        grad_z = torch.empty_like(z_PBLH)
        for b in range(h_BSH.shape[0]):
            teacher_SV = torch.softmax(h_BSH[b] @ head_VH.t(), dim=-1)
            best_S = teacher_SV.argmax(dim=-1, keepdim=True)
            for p in range(num_passes):
                window = slice(p + 1, p + 1 + length)
                teacher, best = teacher_SV[window], best_S[window]
                valid = valid_PBL[p, b].to(z_PBLH.dtype).unsqueeze(1) / num_valid[p]
                student = torch.softmax(z_PBLH[p, b] @ head_VH.t(), dim=-1)
                picked = student.gather(1, best)
                overlap[p] += (torch.minimum(student, teacher).sum(1, keepdim=True) * valid).sum()
                agreement[p] += ((student.argmax(1, keepdim=True) == best) * valid).sum()
                weight = valid * pass_weights[p]
                loss -= argmax_share * (picked.clamp_min(1e-30).log() * weight).sum()
                grad = student.sub_(teacher, alpha=1 - argmax_share)
                grad.scatter_add_(1, best, torch.full_like(picked, -argmax_share))
                torch.mm(grad.mul_(weight), head_VH, out=grad_z[p, b])
        ctx.save_for_backward(grad_z)
        ctx.mark_non_differentiable(agreement, overlap)
        return loss, agreement, overlap

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_loss = grad_outputs[0]  # the two rates are not differentiable
        (grad_z,) = ctx.saved_tensors
        return grad_z * grad_loss, None, None, None, None, None


def distillation(
    z_PBLH: Tensor,
    h_BSH: Tensor,
    head_VH: Tensor,
    valid_PBL: Tensor,
    pass_weights: tuple[float, ...],
    argmax_share: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of MTP drafts towards the main model's own next-token distributions.

    Pass `p` (from 0) of chain start `i` is compared with the main model at position `i + p + 1`,
    so `h` holds S = L + P positions. The target is `(1 - argmax_share) * softmax(main logits)` plus
    `argmax_share` on the main model's greedy token. Nothing flows into `h` and `head`.

    Returns a scalar whose gradient is right (its value covers the greedy part only), and per pass
    [P] the rate of equal argmaxes and the mean overlap `sum_v min(p, q)`: the highest acceptance
    that any lossless sampling scheme could reach.
    """
    return _Distillation.apply(z_PBLH, h_BSH, head_VH, valid_PBL, pass_weights, argmax_share)


def _segments(counts: list[int], weights: Tensor, rows: Tensor, out: Tensor) -> Any:
    """Yield (rows of an expert, its weight, its part of the output)."""
    return zip(rows.split(counts), weights.unbind(0), out.split(counts), strict=True)


def _segment_pairs(counts: list[int], left: Tensor, right: Tensor, out: Tensor) -> Any:
    """Yield (left rows of an expert, right rows, the expert's slice of a weight gradient)."""
    return zip(left.split(counts), right.split(counts), out.unbind(0), strict=True)
