"""verify_attn: absorbed-MLA attention of draft-tree slots over a paged latent prefix plus their own ancestors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftwood.kernels.registry import for_array
from draftwood.kernels.specialised import Use, refusal
from draftwood.tree import Array

PAGE_SIZES = (16, 32, 64)


def verify_attn(
    q: Array,
    pages: Array,
    page_table: Array,
    prefix_len: Array,
    tree_kv: Array,
    ancestors: Array,
    n_slots: Array,
    scale: float,
    *,
    value_dim: int,
    impl: str | None = None,
) -> tuple[Array, Array]:
    """softmax(scale * q k^T) v for every slot, where slot i sees the whole prefix and its ancestor slots.

    Args:
        q: [B, T, H, C] with C = R + P: the query in latent space (R), then its rope part (P).
        pages: [n_pages, page, C] latent cache of one layer; key = the C numbers, value = the first R of them.
        page_table: [B, M] i32, page of each `page` positions of a row; entries past the prefix are ignored.
        prefix_len: [B] i32, committed positions; 0 is legal.
        tree_kv: [B, T, C] latents of the slots themselves.
        ancestors: [B, T, W] i64 bits (see `DraftTree`); bits at or past n_slots are ignored.
        n_slots: [B] i32.
        scale: softmax scale.
        value_dim: R.
        impl: implementation name; None chooses by the type, device, widths and page size.

    Returns:
        o [B, T, H, R] in q's dtype and lse [B, T, H] f32 (f64 for f64 input): natural log of the sum of
        exp(scaled scores), -inf where a slot sees nothing. Slots >= n_slots give 0 and -inf. Page tails past
        prefix_len, pages not in use and slots >= n_slots never matter, whatever bits they hold, NaN included;
        NaN in a live position may reach its own request only.
    """
    fn = for_array("verify_attn", q, impl, lambda: use_of(q, pages, value_dim))
    return fn(  # type: ignore[no-any-return]
        q, pages, page_table, prefix_len, tree_kv, ancestors, n_slots, scale, value_dim=value_dim
    )


def check_use(impl: str, q: Array, pages: Array, value_dim: int) -> None:
    """Raise `NotImplementedError` for a use that an implementation is not made for, saying why."""
    if why_not := refusal("verify_attn", impl, use_of(q, pages, value_dim)):
        raise NotImplementedError(f"{impl} {why_not}")


def check_pages(pages: Array) -> None:
    """Raise `ValueError` where a tensor's pages are not contiguous, for implementations that read them through one tensor map."""
    if not pages.is_contiguous():
        raise ValueError(f"`pages`: expected contiguous pages, got strides {pages.stride()}")


def use_of(q: Array, pages: Array, value_dim: int) -> Use:
    """Of tensors; see `verify_attn` for them."""
    from draftwood.kernels.chip import chip_of

    capability = chip_of(q.device).capability
    dtype = str(q.dtype).removeprefix("torch.")
    return Use(capability, dtype, value_dim, q.shape[-1] - value_dim, pages.shape[1])


def for_layers(
    attend: Callable[..., Any],
    page_table: Array,
    prefix_len: Array,
    ancestors: Array,
    n_slots: Array,
    page: int,
) -> Callable[..., Array]:
    """The implementation `attend` with what all layers of a pass share: a function of (q, pages, tree_kv, scale, *,
    value_dim) that returns o.

    An implementation with work that does not depend on the layer has such a function's maker as an attribute
    `prepare`, which takes the shared arguments; `page` is the page size.
    """
    prepare: Callable[..., Callable[..., Array]] | None = getattr(attend, "prepare", None)
    if prepare is not None:
        return prepare(page_table, prefix_len, ancestors, n_slots, page)

    def layer(q: Array, pages: Array, tree_kv: Array, scale: float, *, value_dim: int) -> Array:
        o, _ = attend(
            q, pages, page_table, prefix_len, tree_kv, ancestors, n_slots, scale, value_dim=value_dim
        )
        return o

    return layer
