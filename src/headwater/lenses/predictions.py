"""Predictions of each layer as if it were the last: the logit lens, and the tuned lens.

nostalgebraist, "interpreting GPT: the logit lens", 2020; Belrose et al., "Eliciting Latent Predictions from
Transformers with the Tuned Lens", 2023.

    logits of a layer = cap(norm(lens(h)) W_U + b_U)      h: the residual stream after the layer's block

with the model's own final norm, unembedding, its bias and its soft cap. lens(h) is h itself, or h + A h + b with the
(A, b) of that layer (the tuned lens), or any function of h and the layer.

1. One run of the prompts records the residual stream after every requested layer, and the last, at the positions read.
2. The last layer's logits must equal the model's own: checked at the last token of every prompt, at every call.
3. One pass over tiles of the vocabulary computes each layer's top tokens, the rank of the next token (or of a given
   answer), and KL(last layer ‖ layer) in nats: the information lost by reading this layer instead of the last
   (`kernels.likelihood_blocked`). Only one tile of the vocabulary has its logits in memory, for all layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from headwater.calls import checked_call
from headwater.data.strict_json import parse_json
from headwater.errors import InputError, callers_level
from headwater.kernels.devices import failures_named, to_device
from headwater.kernels.likelihood_blocked import layer_predictions
from headwater.models.bridge_check import is_finite
from headwater.models.edits import at_tokens, keeping
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt, Where, positions_read
from headwater.models.sites import hook_name
from headwater.models.tokens import Batch, note_on_chats, pad_id, warn_of_missing_spaces
from headwater.models.unembedding import refuse_other_logits, unembedding_head
from headwater.options import checked_count, checked_path, resolve_indices, shown
from headwater.patching.metrics import Answer, answer_ids
from headwater.patching.prompts import Prompts, read_prompts
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.identity import digest
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, interval_text, whole_summary
from headwater.stats.resample import mean_interval


@dataclass(frozen=True, repr=False)
class LayerPredictions(Result):
    """The predictions of each layer at each position of some prompts."""

    table: pd.DataFrame
    """A row per example, layer, position and rank among the top tokens: `example, layer, position, token` (the prompt's
    token there), `top` (the rank, from 1), `top_token, probability`, `rank` (of the next token, or of the given answer;
    0 is the first choice; `<NA>` if there is no next token) and `kl` (KL(last layer ‖ layer), in nats); also `role`, if
    positions were named by role."""
    targets: pd.DataFrame
    """A row per example and position: `example, position, target, target_id`: the token whose rank is in the table."""
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Summarize each layer over examples and positions.

        Returns:
            A row per layer: `layer, places, agrees` (the share of places whose top token is the last layer's), `first`
            (the share whose target has rank 0), `rank` (its median), and the mean `kl` with its bootstrap interval over
            examples, `low` and `high`.
        """
        best, final = self.table[self.table["top"] == 1], self.run.options["layers"][-1]
        if final not in set(best["layer"]):
            raise InputError(f"The table lacks layer {final}, with which each layer is compared: keep its rows.")
        last = best[best["layer"] == final].set_index(["example", "position"])["top_token"]
        rows = []
        for layer, part in best.groupby("layer", sort=True):
            same = part["top_token"].to_numpy() == last.loc[list(zip(part["example"], part["position"], strict=True))]
            ranks = part["rank"].dropna().to_numpy(dtype=float)
            kl = mean_interval(part["kl"].to_numpy(dtype=float), part["example"])
            first, median = (float((ranks == 0).mean()), float(np.median(ranks))) if len(ranks) else (np.nan, np.nan)
            rows.append([layer, len(part), float(np.mean(same)), first, median, *kl])
        return pd.DataFrame(rows, columns=["layer", "places", "agrees", "first", "rank", "kl", "low", "high"])

    def report(self) -> list[str]:
        """Return the layer from which the last layer's choice is visible, and the KL divergence of the first layer."""
        layers = whole_summary(self)
        examples, places = self.table["example"].nunique(), int(layers["places"].iloc[-1])
        sentences = [f"Decoded: {places} position{'s' * (places != 1)} of {examples} prompt{'s' * (examples != 1)}."]
        differs = layers.loc[layers["agrees"] < 0.5, "layer"]
        since = layers.loc[layers["layer"] > (differs.max() if len(differs) else -1)].iloc[0]
        sentences.append(
            f"From layer {since['layer']:.0f} on, the top token agrees with the last layer's at half of the positions "
            f"or more ({since['agrees']:.0%} at layer {since['layer']:.0f})."
        )
        first = layers.iloc[0]
        far = interval_text(first, "kl")
        sentences.append(f"The KL divergence of layer {first['layer']:.0f} from the last layer is {far} nats.")
        row = layers.iloc[-1]
        if np.isfinite(row["first"]):
            ranked = int(self.table.query("top == 1").groupby("layer")["rank"].count().iloc[-1])
            sentences.append(
                f"At the last layer, the ranked token (answer=, or else the text's next token) is the top token at "
                f"{row['first']:.0%} of {ranked} position{'s' * (ranked != 1)}, and its median rank is "
                f"{row['rank']:.0f}."
            )
        sentences.append(
            "A lens shows what the final norm and the unembedding decode from a layer, not what the model does with it."
        )
        return sentences


@checked_call
def lens(
    model: HookedModel,
    prompts: Prompts,
    *,
    lens: Lens = "logit",
    layers: Layers = "all",
    positions: Where = "all",
    answer: Answer | None = None,
    top_k: int = 5,
    batch_size: int = 16,
    progress: bool = True,
    out: str | Path | None = None,
) -> LayerPredictions:
    """Read every layer as if it were the last: its top tokens, the rank of the next token, KL from the last layer.

    The logits of a layer are cap(norm(lens(h)) W_U + b_U), with h the residual stream after its block; divergences
    are in nats (nostalgebraist 2020; Belrose et al. 2023).

    Args:
        model: the model.
        prompts: one prompt, several, or token ids.
        lens: how layers are read: "logit", the folder of a tuned lens (as the tuned-lens package writes it), a function
            of the residual stream and the layer, or the (A, b) of a tuned lens by layer.
        layers: "all", a layer or several; the last is always included. Layer l is the residual stream after its block.
        positions: which positions are read, as in `hw.patch`.
        answer: the token whose rank is computed at every position: a text or an id, one for all prompts or one per
            prompt. Default: the next token of the prompt at each position.
        top_k: number of top tokens to store.
        batch_size: prompts in one run.

    Raises:
        ModelError: the last layer's logits are not the model's own output.
    """
    n_layers = model.shape.n_layers
    opened, read = open_lens(lens, n_layers, model.shape.d_model), read_prompts(model, prompts)
    # Always includes the last layer, which KL and the check against the model's own logits need.
    chosen = sorted({*resolve_layers(layers, n_layers), n_layers - 1})
    transform = reader(opened, chosen, n_layers)
    top_k = checked_count("top_k", top_k, most=model.shape.d_vocab)
    rows = positions_read(positions, read)
    if "role" in rows:
        # Read once, with the names of all its roles.
        rows = rows.groupby(["example", "position"])["role"].agg(", ".join).reset_index()
    targets = _targets(model, read, rows, answer)
    places = rows[["example", "position"]].to_numpy()
    # -1 at a position without a next token.
    target_ids = targets["target_id"].fillna(-1).to_numpy(dtype=np.int64)
    options = {
        "prompts": [list(prompt.ids) for prompt in read], "lens": lens_named(opened), "layers": chosen,
        "positions": places.tolist(), "top_k": top_k, "targets": target_ids.tolist(),
        **note_on_chats(prompt.text for prompt in read),
    } | ({"roles": rows["role"].tolist()} if "role" in rows else {})  # fmt: skip

    def work(run: Run) -> LayerPredictions:
        normalise, head = unembedding_head(model, run.record)

        @torch.inference_mode()
        def measure(examples: range) -> dict[str, Tensor]:
            """Return the predictions of layers, `layer row ...`; a row is a position read in an example."""
            batch = Batch.of([read[i].ids for i in examples], pad_id(model.tokenizer)).named(examples)
            mine = np.isin(places[:, 0], examples)
            of_batch, columns = torch.from_numpy(places[mine] - [examples.start, 0]).T
            recorded, ends = dict[str, Tensor](), dict[str, Tensor]()
            names = [hook_name("resid_post", layer) for layer in chosen]
            hooks = keeping(names, recorded, at_tokens(of_batch, columns))
            hooks += keeping(names[-1:], ends, at_tokens(torch.arange(len(batch)), batch.lengths - 1))
            expected = model.run(batch, hooks, keep="last")[:, 0]
            # Checked at the last tokens whatever positions are read, because the run computes these logits anyway.
            refuse_other_logits(model, head.logits(normalise(ends[names[-1]]).float(), slice(None)), expected)
            device = head.W_U.device
            last = normalise(recorded[names[-1]]).to(device)
            of_layers = zip(names, chosen, strict=True)
            hidden = [normalise(transform(recorded[name], layer)).to(device).float() for name, layer in of_layers]
            # A position without a next token gets token 0, and its rank is removed from the table.
            target = to_device(torch.from_numpy(target_ids[mine].clip(0)), device)
            found = layer_predictions(torch.stack(hidden), last, head, target, top_k)
            return {name: part.cpu().contiguous() for name, part in found._asdict().items()}

        batches = [range(len(read))[start : start + batch_size] for start in range(0, len(read), batch_size)]
        with run.bar("Reading layers", "prompt", len(read)) as bar:
            pieces = list(run.pieces("examples", batches, measure, bar, len))
        found = {name: torch.cat([piece[name] for piece in pieces], dim=1) for name in pieces[0]}
        return LayerPredictions(_table(model, found, chosen, read, rows, targets), targets, run.record)

    return run_or_resume(LayerPredictions, "lens", model, options, work, out=out, progress=progress)


def _targets(model: HookedModel, prompts: Sequence[Prompt], rows: pd.DataFrame, answer: Answer | None) -> pd.DataFrame:
    """Return the token whose rank is computed at each position read: the answer, or the prompt's next token, if any."""
    places = list(zip(rows["example"], rows["position"], strict=True))
    ids: list[int | None]
    if answer is not None:
        answers = answer_ids(answer, model.tokenizer, len(prompts), model.shape.d_vocab).tolist()
        warn_of_missing_spaces([answer], [prompt.strings[-1] for prompt in prompts], model.tokenizer)
        ids = [answers[example] for example, _ in places]
    else:
        ids = [next(iter(prompts[example].ids[position + 1 :]), None) for example, position in places]
        if model.is_bidirectional and any(token is not None for token in ids):
            warnings.warn(
                f"The attention of {model.name} reads later tokens: at all positions but the last it has already seen "
                "the token whose rank is given. Give answer= or positions='last'.",
                stacklevel=callers_level(),
            )
    known = sorted({token for token in ids if token is not None})
    names = dict(zip(known, model.token_strings(known), strict=True)) if known else {}
    names_of = [None if token is None else names[token] for token in ids]
    targets = pd.Series(names_of, index=rows.index)
    return rows[["example", "position"]].assign(target=targets, target_id=pd.array(ids, dtype="Int64"))


def _table(
    model: HookedModel,
    statistics: dict[str, Tensor],
    layers: Sequence[int],
    prompts: Sequence[Prompt],
    rows: pd.DataFrame,
    targets: pd.DataFrame,
) -> pd.DataFrame:
    """Return the predictions by example, layer, position and rank among the top tokens."""
    n_layers, n_rows, k = statistics["top"].shape
    example, position = (rows[name].to_numpy() for name in ("example", "position"))
    token = np.array([prompts[i].strings[at] for i, at in zip(example, position, strict=True)], object)
    # Each token is decoded once, because layers and positions share few distinct tokens.
    used, index = np.unique(statistics["top"].numpy(), return_inverse=True)
    strings = np.array(model.token_strings(used.tolist()), dtype=object)
    each = np.tile(np.arange(n_rows), n_layers).repeat(k)
    table = pd.DataFrame(
        {
            "example": example[each],
            "layer": np.repeat(layers, n_rows * k),
            "position": position[each],
            "token": token[each],
            "top": np.tile(np.arange(1, k + 1), n_layers * n_rows),
            "top_token": strings[index].reshape(-1),
            "probability": statistics["log_probability"].double().exp().numpy().reshape(-1),
            "rank": pd.array(statistics["rank"].numpy().reshape(-1).repeat(k), dtype="Int64"),
            "kl": statistics["kl"].double().numpy().reshape(-1).repeat(k),
        }
    )
    table.loc[targets["target_id"].isna().to_numpy()[each], "rank"] = pd.NA
    if "role" in rows:
        table["role"] = rows["role"].to_numpy()[each]
    return table.sort_values(["example", "layer", "position", "top"], ignore_index=True)


# Tuned lenses as the tuned-lens package stores them: a folder with config.json and params.pt.
#
# The file has a translator (`0.weight`, `0.bias`, `1.weight`, ...) for each of the model's blocks, and translator i
# reads the input of block i: h + A_i h + b_i. So translator i + 1 belongs to the residual stream after block i, where
# headwater reads layer i; translator 0 reads the embedding, which is not a layer here, and the last layer needs none.


CONFIG, PARAMETERS = "config.json", "params.pt"


@checked_call
def load_tuned_lens(folder: str | Path) -> dict[int, tuple[Tensor, Tensor]]:
    """Read a tuned lens from its folder.

    Args:
        folder: a folder that `TunedLens.save` wrote, or that of a published lens. It is loaded without executing code.

    Returns:
        (A, b) in float32 by layer, as `lens=` takes them. A lens of L blocks has those of layers 0 to L - 2.
    """
    path = checked_path("lens", folder)
    damage = f"{CONFIG} or {PARAMETERS} is missing or damaged, or lacks a layer"
    with failures_named(f"lens={str(folder)!r} is neither 'logit' nor the folder of a tuned lens; {damage}"):
        config = parse_json((path / CONFIG).read_bytes())
        d_model, n_layers = int(config["d_model"]), int(config["num_hidden_layers"])
        state = torch.load(path / PARAMETERS, "cpu", weights_only=True)
        named = {name.removeprefix("layer_translators."): tensor for name, tensor in state.items()}
        A = {layer: named[f"{layer + 1}.weight"].float() for layer in range(n_layers - 1)}
        return {layer: (A[layer], named.get(f"{layer + 1}.bias", torch.zeros(d_model)).float()) for layer in A}


Lens: TypeAlias = str | Path | Callable[[Tensor, int], Tensor] | Mapping[int, tuple[Tensor, Tensor]]
"""The logit lens ("logit"); a folder that the tuned-lens package wrote; a function of the residual stream `token
d_model` (float32) and the layer, which returns the input of the final norm; or each layer's (A, b) of a tuned lens,
which adds A h + b to the residual stream h."""
Layers: TypeAlias = str | int | Sequence[int]
"""The final layer ("final"), all layers ("all"), one or several."""


def resolve_layers(layers: Layers, n_layers: int) -> tuple[int, ...]:
    """Return the requested layers, in order."""
    if isinstance(layers, str):
        if layers not in ("final", "all"):
            raise InputError(f"layers={layers!r} is neither 'final' nor 'all', nor a layer, nor several.")
        return (n_layers - 1,) if layers == "final" else tuple(range(n_layers))
    return resolve_indices(layers, n_layers, "layer")


def open_lens(lens: Lens, n_layers: int, d_model: int) -> Lens:
    """Return a lens, loaded if it is a folder; refuse what is not a lens of a model of this shape."""
    if isinstance(lens, Path) or (isinstance(lens, str) and lens != "logit"):
        lens = load_tuned_lens(lens)
        if len(lens) != n_layers - 1:
            raise InputError(f"The tuned lens is of a model of {len(lens) + 1} layers; this one has {n_layers} layers.")
    if isinstance(lens, Mapping):
        pairs: Any = lens.items()
        for layer, pair in pairs:
            is_layer = isinstance(layer, Integral) and not isinstance(layer, bool)
            is_pair = isinstance(pair, list | tuple) and all(isinstance(part, Tensor) for part in pair)
            shapes = [tuple(part.shape) for part in pair] if is_pair else []
            if not is_layer or shapes != [(d_model, d_model), (d_model,)]:
                raise InputError(
                    "A tuned lens maps layers, whole numbers, to pairs of tensors (A, b), here of shapes "
                    f"({d_model}, {d_model}) and ({d_model},); layer {shown(layer)} has {shapes or shown(pair)}."
                )
            if not all(map(is_finite, pair)):
                raise InputError(f"The translator of layer {layer} of the tuned lens holds NaN or infinity.")
    elif not callable(lens) and not isinstance(lens, str):
        raise InputError(
            f"lens={shown(lens)} is neither 'logit', nor the folder of a tuned lens, nor a function, nor a mapping of "
            "layers to (A, b)."
        )
    return lens


def reader(lens: Lens, layers: Sequence[int], n_layers: int) -> Callable[[Tensor, int], Tensor]:
    """Return the function from a layer's residual stream, in the model's dtype, to the input of the final norm."""
    if isinstance(lens, Mapping):
        missing = [layer for layer in layers if layer not in lens and layer != n_layers - 1]
        if missing:
            raise InputError(f"The tuned lens has no translator for layer {missing[0]}; it has {sorted(lens)}.")

        def translate(residual: Float[Tensor, "token d_model"], layer: int) -> Tensor:
            # The last layer needs no translator; any other layer without one was refused before.
            if layer not in lens:
                return residual
            wide = residual.float()
            A, b = (part.to(wide) for part in lens[layer])
            return wide + wide @ A.T + b

        return translate
    if not callable(lens):
        return lambda residual, layer: residual

    def called(residual: Tensor, layer: int) -> Tensor:
        with failures_named("The lens failed"):
            result = lens(residual.float(), layer)
        if not isinstance(result, Tensor) or result.shape != residual.shape:
            what = tuple(result.shape) if isinstance(result, Tensor) else f"a {type(result).__name__}"
            raise InputError(
                f"The lens must give a tensor of shape {tuple(residual.shape)} at layer {layer}, found {what}."
            )
        if not is_finite(result):
            raise InputError(f"The lens gives NaN or infinity at layer {layer}: check its function.")
        return result

    return called


def lens_named(lens: Lens) -> Any:
    """Return the value that identifies a lens in the record of a run; for a mapping, a hash of its numbers."""
    if not isinstance(lens, Mapping):
        return lens
    return f"tuned lens {digest([(layer, [part.double() for part in lens[layer]]) for layer in sorted(lens)])}"
