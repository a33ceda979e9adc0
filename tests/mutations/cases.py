"""The mutations: what is broken, where, and which tests should notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One change of the code that makes it wrong.

    Args:
        name: what is broken.
        file: below `hf_posenc`.
        before: the text that is replaced; it occurs once.
        after: what takes its place.
        tests: paths and options of pytest, narrow enough to take less than a minute.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


_ATTENTION = ("tests/attention",)
_WINDOWS = ("tests/attention/test_windows.py",)
_CACHES = ("tests/patching", "-k", "cache")

CASES = (
    Mutation(
        "windows: too much is skipped",
        "attention/windows.py",
        "share = torch.finfo(query.dtype).eps / 4",
        "share = 0.1",
        _WINDOWS,
    ),
    Mutation(
        "windows: queries that do not see themselves",
        "attention/windows.py",
        "needed = needed.masked_fill(~call.sees_itself, -torch.inf)",
        "pass",
        _WINDOWS,
    ),
    Mutation(
        "windows: gradients of keys",
        "attention/windows.py",
        "needed += (lengths[..., own] / longest).log()",
        "pass",
        _WINDOWS,
    ),
    Mutation(
        "block bias: a later key is visible",
        "attention/block_bias.py",
        "vector[:, query_length:] = -torch.inf",
        "vector[:, query_length + 1 :] = -torch.inf",
        _ATTENTION,
    ),
    Mutation("block bias: its own key is hidden", "attention/block_bias.py", ".tril(-1)", ".tril()", _ATTENTION),
    Mutation(
        "forms: a row sees one key less",
        "attention/forms.py",
        "(torch.arange(seen, device=device) <= rows.unsqueeze(-1))",
        "(torch.arange(seen, device=device) < rows.unsqueeze(-1))",
        _ATTENTION,
    ),
    Mutation(
        "forms: shared although recomputed",
        "attention/forms.py",
        "(not form.requires_grad or gradients_may_be_shared())",
        "True",
        ("tests/attention/test_shared_matrices.py",),
    ),
    Mutation(
        "backends: a mask with gradients",
        "attention/backends.py",
        "if exporting() or learns_mask or",
        "if exporting() or",
        _ATTENTION,
    ),
    Mutation(
        "backends: a soft cap is ignored",
        "attention/backends.py",
        '("dropout", "softcap", "s_aux", "output_attentions")',
        '("dropout", "s_aux", "output_attentions")',
        ("tests/attention/test_shared_matrices.py",),
    ),
    Mutation(
        "backends: a large bias unmasks",
        "attention/backends.py",
        ".masked_fill(masked, smallest)",
        "",
        ("tests/attention", "tests/patching", "-k", "mask or agree"),
    ),
    Mutation(
        "channels: rounded to half precision",
        "attention/key_channels.py",
        "return 1 if dtype in (torch.float32, torch.float64) else 3",
        "return 1",
        ("tests/patching/test_key_channels.py",),
    ),
    Mutation(
        "fused attention: the gradient of a term per key",
        "attention/fused_attention.py",
        "of_terms[block.items, block.heads, block.keys] += scores.sum(-2)",
        "pass",
        _ATTENTION,
    ),
    Mutation(
        "padding: counted from 1",
        "patching/call/cache.py",
        "return real.cumsum(-1) * real - 1",
        "return real.cumsum(-1) * real",
        ("tests/matrix", "-k", "padd"),
    ),
    Mutation(
        "padding: the first query shows it",
        "patching/call/forward_state.py",
        "last = visible[:, -1]\n",
        "last = visible[:, 0]\n",
        ("tests/matrix", "tests/patching", "-k", "padd or mask"),
    ),
    Mutation(
        "positions: masks with holes are even",
        "patching/call/key_positions.py",
        "even = holes is None or not next(found)",
        "even = True",
        ("tests/patching", "tests/matrix", "-k", "hole or padd or position"),
    ),
    Mutation(
        "positions: those of padding count",
        "patching/call/key_positions.py",
        "different = different & (expected >= 0)",
        "pass",
        ("tests/patching", "tests/matrix", "-k", "position or padd"),
    ),
    Mutation(
        "positions: a mask that changed is trusted",
        "patching/call/key_positions.py",
        "if not masks or len({one.shape[0] for one in masks} - {1}) > 1:",
        "if True:",
        _CACHES,
    ),
    Mutation(
        "positions: a changed cache is trusted",
        "patching/call/key_positions.py",
        "if state.cache_changed and known is not None and int(offset or 0) > 0:",
        "if False:",
        _CACHES,
    ),
    Mutation(
        "positions: cached tokens that are not continued",
        "patching/call/key_positions.py",
        "if bool((own[:, 0] <= farthest).any()):",
        "if False:",
        ("tests/patching", "-k", "cache or position"),
    ),
    Mutation(
        "positions: documents that restart are ordered",
        "patching/call/key_positions.py",
        "    if not regularity(state).irregular:\n        return True\n",
        "    return True\n",
        ("tests/attention", "tests/patching", "tests/matrix", "-k", "packed or flash or position"),
    ),
    Mutation(
        "cache: writes are not seen",
        "patching/call/cache.py",
        "return all(one is reference() and _writes(one) == state for one, (reference, state) in pairs)",
        "return all(one is reference() for one, (reference, state) in pairs)",
        _CACHES,
    ),
    Mutation(
        "cache: other rows are followed",
        "patching/call/cache.py",
        "if not bool(same.gather(1, rows).all()):",
        "if False:",
        _CACHES,
    ),
    Mutation(
        "cache: one of a stock model",
        "patching/call/cache_checks.py",
        "    if known is None:\n        raise",
        "    if False:\n        raise",
        _CACHES,
    ),
    Mutation(
        "cache: a static length is never read again",
        "patching/call/cache.py",
        "return counted[1] if counted and counted[0] == _state(length) else int(length)",
        "return counted[1] if counted else int(length)",
        ("tests/patching", "tests/matrix", "-k", "cache or static"),
    ),
    Mutation(
        "checkpointing: another scheme in the second run",
        "patching/call/runtime.py",
        "if self.removed or (not self.has_run and torch._C._current_graph_task_id() != -1):",
        "if False:",
        ("tests/patching", "-k", "recomput or checkpointing or backward"),
    ),
    Mutation(
        "layers: attention without the interface",
        "patching/call/interface_attention.py",
        "        if not call.attended:\n",
        "        if False:\n",
        ("tests/patching", "tests/architectures", "-k", "interface or attention"),
    ),
    Mutation(
        "layers: a causal layer that sees later keys",
        "patching/call/interface_attention.py",
        "        if own is False:\n",
        "        if False:\n",
        ("tests/patching", "tests/architectures", "-k", "causal"),
    ),
    Mutation(
        "layers: other masks share a bias",
        "patching/call/interface_attention.py",
        "function, mask, *kwargs.items())",
        "function, *kwargs.items())",
        ("tests/patching", "tests/matrix", "tests/attention", "-k", "mask or window or sliding or gemma or padd"),
    ),
    Mutation(
        "layers: other biases share a bias",
        "patching/place/encoding.py",
        "self.identity = (id(bias), ",
        "self.identity = (",
        ("tests/patching", "tests/attention", "-k", "layer or compos or own"),
    ),
    Mutation(
        "layers: a skipped rotation",
        "patching/call/attention_site.py",
        "        if not rotated:\n",
        "        if False:\n",
        ("tests/patching", "-k", "rotat or rotary"),
    ),
    Mutation(
        "layers: a cache without its oldest keys",
        "patching/call/logit_site.py",
        "        elif key_start != 0:\n",
        "        elif False:\n",
        ("tests/patching", "tests/schemes", "-k", "slid or window or oldest or cache"),
    ),
    Mutation(
        "layers: another number of heads",
        "patching/call/logit_site.py",
        "    if of_scheme != of_layer:\n",
        "    if False:\n",
        ("tests/patching", "tests/distributed", "-k", "head"),
    ),
    Mutation(
        "state: some of the tokens",
        "patching/call/forward_state.py",
        "        if length < self.query_length:\n",
        "        if False:\n",
        ("tests/patching", "-k", "token"),
    ),
    Mutation(
        "state: learned values are shared in a second run",
        "schemes/positions.py",
        "return torch._C._autograd._top_saved_tensors_default_hooks(True) is None",
        "return True",
        ("tests/matrix", "-k", "checkpointing"),
    ),
    Mutation(
        "threads: one stack of states for all",
        "patching/call/runtime.py",
        "        return self._others.setdefault(get_ident(), [])",
        "        return self._main",
        ("tests/patching", "-k", "thread"),
    ),
    Mutation(
        "context parallel: not refused",
        "patching/call/split_sequence.py",
        "    if runtime.split_problem:\n",
        "    if False:\n",
        ("tests/distributed", "-k", "context"),
    ),
    Mutation(
        "context parallel: gradients of gathered keys are not summed",
        "patching/call/split_sequence.py",
        "        torch.distributed.reduce_scatter(own, parts, group=group)\n",
        "        own = parts[torch.distributed.get_rank(group)]\n",
        ("tests/distributed", "-k", "context"),
    ),
    Mutation(
        "context parallel: a query sees later keys",
        "attention/forms.py",
        "        later = torch.arange(earliest, earliest + form.vector.shape[-1], device=form.vector.device) > 0\n",
        "        later = torch.arange(earliest, earliest + form.vector.shape[-1], device=form.vector.device) > 1\n",
        ("tests/distributed", "-k", "context"),
    ),
    Mutation(
        "journal: forwards are not retired",
        "patching/place/record.py",
        "        ours.retired = True\n",
        "        pass\n",
        ("tests/patching", "-k", "unpatch or undo or wrap"),
    ),
    Mutation(
        "journal: frozen weights stay frozen",
        "patching/place/record.py",
        "parameter.requires_grad_(change.value or parameter.requires_grad)",
        "pass",
        ("tests/patching", "-k", "unpatch or undo or frozen or freez"),
    ),
    Mutation(
        "saving: an old config is readable between two moves",
        "checkpoint/atomic_folder.py",
        "os.replace(draft / _BARRIER, target / _CONFIG)",
        "pass",
        ("tests/checkpoint", "-k", "atomic or kill or interrupt"),
    ),
    Mutation(
        "weights of another scheme are loaded",
        "checkpoint/agreement.py",
        "        if problem is not None:\n",
        "        if False:\n",
        ("tests/checkpoint", "-k", "mismatch or scheme or mark"),
    ),
    Mutation(
        "t5: buckets of near distances",
        "schemes/bias/t5.py",
        "exact = num_buckets // 2",
        "exact = num_buckets // 4",
        ("tests/schemes", "tests/oracles", "-k", "t5"),
    ),
    Mutation(
        "alibi: slopes of other head counts",
        "schemes/bias/alibi.py",
        "for head in range(1, 2 * lower + 1, 2)]",
        "for head in range(1, lower + 1)]",
        ("tests/schemes", "tests/oracles", "-k", "alibi"),
    ),
)
