"""Properties of logits under shifts, far positions, repetition and several axes; norms of queries and keys."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hf_posenc.errors import PositionEncodingError
from hf_posenc.metrics.properties.specimen import (
    SEED,
    TRAINING_LENGTH,
    DoesNotApplyError,
    Found,
    Refusals,
    Specimen,
    build_parts,
    measured,
    positions_at,
    random_contents,
)
from hf_posenc.preserve import isolated_rng
from hf_posenc.schemes.parts import HIDDEN
from hf_posenc.schemes.position_maps.hierarchical import HierarchicalConfig
from hf_posenc.schemes.positions import Positions

SHIFTS = (1, 17, 500, 4000, 30000)
#: Parts compute angles in float32, which rounds 30000 radians by up to 1e-3, for the query and for the key. (In float64
#: relative schemes would stay below 1e-9; schemes that are not relative exceed 1e-2.)
RELATIVE_UP_TO = 2e-3
FAR = (2 * TRAINING_LENGTH, 4 * TRAINING_LENGTH, 30000)
#: Far logits may exceed near ones by this factor: logarithmic temperatures grow by less up to 30000 positions.
BOUNDED_UP_TO = 2.0
#: Two evaluations and two builds agree to the last bit. In a batch of another shape, matrix products may round
#: differently, by a few units in the last place of logits up to about 10.
SAME_UP_TO = 1e-5
#: A rotation in float32 rounds each of 64 components by 6e-8; their norm is off by less than 1e-6.
PRESERVED_UP_TO = 1e-5
AXIS_SHIFTS = (1, 17, 500)
#: A larger change of logits is not rounding, which is 1000 times smaller.
SEEN_ABOVE = 1e-3
_TOKENS = 48
#: Steps per axis, as in a picture of 896 pixels with patches of 14.
_STEPS = 64


@measured(RELATIVE_UP_TO)
def relativity(specimen: Specimen, refusals: Refusals, *, shifts: tuple[int, ...] = SHIFTS) -> Found | None:
    """Measures the largest change of a logit when all positions move by the same shift.

    Contents are random. There are two sets of 96 positions: the first ones, and the first one with a random selection
    below twice the training length, for schemes that treat near and far keys differently. For additive schemes, the
    logits are `(x_i + PE_i) W_q . W_k (x_j + PE_j)`, including contents. The sequence keeps its length, for schemes
    that depend on it. Changes are relative to the largest logit if that is more than 1, and only pairs that the scheme
    may see are compared. Passes up to 2e-3. `details["by_shift"]` is the largest change for each shift, in positions.
    """
    generator = torch.Generator().manual_seed(0)
    spread = torch.randperm(2 * TRAINING_LENGTH, generator=generator)[:96].sort().values
    spread[0] = 0
    by_shift: dict[int, float] = {}
    for name, ids in {"near": torch.arange(96), "spread": spread}.items():
        contents, lengths = random_contents(1, 96), ids[-1:].unsqueeze(0) + 1
        unmoved = None
        with refusals.at(f"{name} positions"):
            unmoved = specimen.logits(positions_at(ids, lengths=lengths), contents)
        for shift in shifts if unmoved is not None else ():
            with refusals.at(f"{name} positions moved by {shift}"):
                moved = specimen.logits(positions_at(ids + shift, lengths=lengths), contents)
                by_shift[shift] = max(by_shift.get(shift, 0.0), logit_change(specimen, moved, unmoved))
    return (max(by_shift.values()), {"by_shift": by_shift}) if by_shift else None


def logit_change(specimen: Specimen, logits: Tensor, reference: Tensor) -> float:
    """Returns the largest difference on visible pairs, relative to the largest logit if that is more than 1."""
    visible = specimen.visible(logits.shape[-1])
    reference = reference[..., visible]
    size = reference.where(reference > HIDDEN / 2, 0.0).abs().max().clamp(min=1)
    difference = (logits[..., visible] - reference).abs().max() / size
    # NaN is not a small change.
    return float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")))


@measured(BOUNDED_UP_TO)
def defined_past_training(specimen: Specimen, refusals: Refusals) -> Found:
    """Measures whether a scheme can be evaluated beyond the training length, with finite logits of the usual size.

    This is what can be said about extrapolation without training. It is necessary, not sufficient: RoPE passes, but
    models trained with it still collapse there. Training shows what happens to the *loss* (`hf-posenc compare`).

    48 tokens at the start of a sequence and 48 at its far end, which begins at 2048, 4096 or 30000, attend to each
    other. The value is the largest far logit over the largest near one. Passes if all logits are finite and the
    value is at most 2 (a bias may fall without limit).
    """
    contents, start, visible = random_contents(4, 96), torch.arange(48), specimen.visible(96)
    near = specimen.logits(positions_at(torch.cat((start, start + TRAINING_LENGTH - 48))), contents)[..., visible]
    by_position: dict[int, float] = {}
    finite = True
    for position in FAR:
        with refusals.at(f"positions from {position}"):
            logits = specimen.logits(positions_at(torch.cat((start, start + position))), contents)[..., visible]
            finite = finite and bool(logits.isfinite().all())
            by_position[position] = float(logits.max()) / float(near.max())
    if not by_position:
        return None, {}, False, None
    value = max(by_position.values())
    passed = finite and not refusals and value <= BOUNDED_UP_TO
    return value, {"by_position": by_position, "finite": finite}, passed, None


@measured(SAME_UP_TO)
def determinism(specimen: Specimen, refusals: Refusals) -> Found:
    """Measures the largest difference between logits that must be the same.

    Three comparisons are made: two evaluations with different random states; two builds with different random states,
    the second with the weights of the first; and a sequence alone and in a batch with a longer one (padded before and
    after it). `details` has each. Passes up to 1e-5, relative to the largest logit if that is more than 1.
    """
    contents, visible = random_contents(1, _TOKENS), specimen.visible(_TOKENS)

    def evaluate(subject: Specimen, seed: int) -> Tensor:
        with isolated_rng(seed):
            return subject.logits(positions_at(torch.arange(_TOKENS)), contents)[..., visible]

    parts = build_parts(specimen.config, specimen.context, SEED + 1000)
    for new, old in zip(parts, specimen.parts, strict=True):
        new.load_state_dict(old.state_dict())
    first = evaluate(specimen, 1)
    compared = {
        "evaluations": [evaluate(specimen, 2)],
        "builds": [evaluate(dataclasses.replace(specimen, parts=parts), 1)],
        "batches": [row[..., visible] for row in _in_batches(specimen, contents)],
    }
    size = float(first.abs().max().clamp(min=1))
    details = {name: max(float((row - first).abs().max()) for row in rows) / size for name, rows in compared.items()}
    return max(details.values()), details


def _in_batches(specimen: Specimen, contents: Tensor) -> list[Tensor]:
    """Returns the logits of a sequence of 48 in a batch with one of 64, padded on the left and on the right."""
    results = []
    other, padding = random_contents(1, 64, seed=SEED + 1), torch.full((16,), -1)
    ids, token_ids, filler = torch.arange(48), torch.arange(48) * 7 % 11, torch.zeros(1, 16, contents.shape[-1])
    for order in (1, -1):
        padded = ((padding, ids), (padding * 0, token_ids))
        row_ids, row_tokens = (torch.cat(pair[::order]) for pair in padded)
        positions = Positions(
            torch.stack((row_ids, torch.arange(64))),
            torch.tensor([[48], [64]]),
            token_ids=torch.stack((row_tokens, torch.arange(64) * 7 % 11)),
        )
        logits = specimen.logits(positions, torch.cat((torch.cat((filler, contents)[::order], dim=1), other)))
        inside = slice(16, 64) if order == 1 else slice(0, 48)
        results.append(logits[:1, :, inside, inside])
    return results


@measured(PRESERVED_UP_TO)
def norm_preservation(specimen: Specimen, refusals: Refusals) -> Found | None:
    """Measures the largest relative change of the norm of a query or key, `max_p | |R_p x| / |x| - 1 |`.

    Queries and keys are random. Positions are those of the training length and some far beyond it. Passes up to 1e-5.
    `details["by_position"]` is the part that depends on the position, `max_p | |R_p x| / |R_0 x| - 1 |`: zero for a
    rotation of vectors that were changed in other ways.
    """
    query_key_map = specimen.parts.query_key_map
    if query_key_map is None:
        raise DoesNotApplyError("the scheme does not map queries and keys")
    changes, by_position = [], []
    windows = {"positions of the training length": torch.arange(TRAINING_LENGTH)}
    windows |= {f"position {far}": torch.tensor([0, far]) for far in (4 * TRAINING_LENGTH, 30000)}
    for name, ids in windows.items():
        with refusals.at(name):
            heads = random_contents(8, specimen.context.num_heads).unsqueeze(2).expand(-1, -1, ids.shape[0], -1)
            phases = query_key_map.phases(positions_at(ids))
            for apply in (query_key_map.map_query, query_key_map.map_key):
                norms = apply(heads, phases).double().norm(dim=-1)
                changes.append(float((norms / heads.double().norm(dim=-1) - 1).abs().max()))
                by_position.append(float((norms / norms[..., :1] - 1).abs().max()))
    return (max(changes), {"by_position": max(by_position)}) if changes else None


@measured(RELATIVE_UP_TO)
def extensibility(specimen: Specimen, refusals: Refusals) -> Found:
    """Measures whether logits depend on every axis, and on each only through distances along it.

    48 tokens are placed at random on a grid of 64 steps per axis. Passes if logits change when the coordinates of any
    one axis are drawn again (by more than 1e-3), and do not when all of them move together along one axis by any of the
    shifts 1, 17 and 500 (up to 2e-3). With all axes but one fixed, it is then a relative scheme of one dimension. The
    two axes of a hierarchical scheme are the segment and the place in it.

    The value is the largest change under a shift. `details` has it by axis, with the change when that axis is drawn
    again, and `text`: the change from no coordinates at all to coordinates that all equal the position, which is 0 if
    one-dimensional text is a special case of the scheme.
    """
    config, segment_length = specimen.config, None
    if isinstance(config, HierarchicalConfig):
        if config.separators:
            raise DoesNotApplyError("segments end at separator tokens, so their ends do not follow from positions")
        segment_length = config.segment_length

    def logits(coordinates: Tensor | None) -> Tensor:
        ids = torch.arange(_TOKENS)
        if segment_length is not None and coordinates is not None:
            ids, coordinates = coordinates[0] * segment_length + coordinates[1], None
        return specimen.logits(positions_at(ids, coordinates), random_contents(1, _TOKENS))

    def reads(axes: int) -> bool:
        """Whether the scheme has this number of axes. Otherwise it refuses these coordinates or ignores them."""
        try:
            first, second = (logits(_grid(axes, seed, _STEPS)) for seed in (0, 1))
        except (PositionEncodingError, ValueError):
            return False
        return logit_change(specimen, second, first) > SEEN_ABOVE

    axes = 2 if segment_length is not None else next((count for count in (2, 3, 4) if reads(count)), None)
    if axes is None:
        raise DoesNotApplyError("the scheme reads no coordinates")
    # Tokens are in the first quarter of their segments, so that they stay in them under a shift.
    steps = _STEPS if segment_length is None else max(segment_length // 4, 1)
    grid, other = _grid(axes, 0, steps), _grid(axes, 1, steps)
    reference = logits(grid)
    seen, moved = [], []
    for axis in range(axes):
        here = torch.arange(axes).unsqueeze(-1) == axis
        seen.append(logit_change(specimen, logits(torch.where(here, other, grid)), reference))
        allowed = [s for s in AXIS_SHIFTS if segment_length is None or axis == 0 or s + steps <= segment_length]
        moved.append(max(logit_change(specimen, logits(grid + here * shift), reference) for shift in allowed))
    text = None
    if segment_length is None:
        text = logit_change(specimen, logits(torch.arange(_TOKENS).expand(axes, -1)), logits(None))
    passed = max(moved) <= RELATIVE_UP_TO and min(seen) > SEEN_ABOVE
    return max(moved), {"axes": axes, "moved": moved, "seen": seen, "text": text}, passed, None


def _grid(axes: int, seed: int, steps: int) -> Tensor:
    """Draws `(axes, tokens)`."""
    return torch.randint(0, steps, (axes, _TOKENS), generator=torch.Generator().manual_seed(seed))
