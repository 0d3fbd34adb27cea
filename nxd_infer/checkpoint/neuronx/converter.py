"""``CheckpointConverterBase``: the unsharded state of a model into files of each rank, and back.

Scripts derive from it, override what their model needs, and call ``run`` with its arguments::

    class Converter(CheckpointConverterBase):
        def get_partition_dim(self, name): ...

    converter = Converter()
    parser, args = converter.get_arg_parser()
    converter.run(parser.parse_args())

Either way is one table of layouts: of each tensor in a rank's file, the unsharded tensors that it is a part of.

Source: NxD Training documentation, "Checkpoint Conversion".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nxd_infer.checkpoint.neuronx.archive import ReferenceArchive
from nxd_infer.checkpoint.neuronx.folder import DONE, MARK
from nxd_infer.errors import CheckpointError, ModelConfigError
from nxd_infer.layout import AxisPlan, MergedSource, ParamLayout, Run, as_source, iter_shards
from nxd_infer.layout.files.pickles import read_pickle

__all__ = ["CheckpointConverterBase"]

COLUMNS = ("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj", "lm_head")
ROWS = ("o_proj", "down_proj")
EMBEDDINGS = ("embed", "wte", "wpe")
"""Parts of names outside of all layers that are before them; the others are after them."""
FILES = (".pt", ".pth", ".bin", ".safetensors")
Shapes = Mapping[str, tuple[int, ...]]


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"must be True or False, got {text!r}")
    return text.lower() in ("true", "1")


class CheckpointConverterBase:
    """Names and dimensions are those of Llama; override the methods for another model."""

    # --- what a script overrides ----------------------------------------------------------------------

    def get_partition_dim(self, name: str) -> int | None:
        """Return the dimension along which ``name`` is split, None for a tensor that each rank has all of."""
        parts = name.split(".")
        return 0 if any(part in COLUMNS for part in parts) else 1 if any(part in ROWS for part in parts) else None

    def get_partition_stride(self, name: str) -> int:
        """Return how many tensors follow one another along that dimension, of each of which a rank has its part."""
        return 2 if "gate_up_proj" in name else 1

    def pre_process_full_state_before_tp_conversion(self, state_dict: dict[str, Tensor], args: Any) -> dict:
        """Return the state to shard: what is stored as one here may be several tensors of a Hugging Face model."""
        return state_dict

    def post_process_full_state_after_tp_conversion(self, state_dict: dict[str, Tensor], args: Any) -> dict:
        """Return the state to store: the inverse."""
        return state_dict

    # --- the command ----------------------------------------------------------------------------------

    def get_arg_parser(self) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
        """Return the parser and what it makes of the command line; a script may add arguments and parse again."""
        parser = argparse.ArgumentParser(description=self.__doc__)
        add = parser.add_argument
        add("--input_dir", help="the file or Hugging Face directory, or the folder with model/")
        add("--output_dir", help="the folder of the ranks' files, or a file or folder for the state")
        ways = parser.add_mutually_exclusive_group()
        for way in ("from_full_state", "to_full_state", "from_xser", "to_xser"):
            ways.add_argument(f"--convert_{way}", action="store_true")
        add("--config", help="config.json, for the numbers of heads; default: beside the input")
        add("--hw_backend", choices=("trn1", "trn2"), help="order of replicated key/value heads; default: trn2's")
        add("--model_key", default="model", help="where the state is in a file that holds more")
        for name in ("tp_size", "pp_size", "ep_size", "kv_size_multiplier"):
            add(f"--{name}", type=int, default=1)
        add("--n_layers", type=int, help="layers of the model; checked")
        add("--qkv_linear", type=_flag, default=False, help="q, k and v are one GQAQKVColumnParallelLinear")
        add("--fuse_qkv", type=_flag, default=False, help="with qkv_linear: it has one weight")
        add("--coalesce_qkv", type=_flag, default=False, help="q, k and v are the one weight of qkv_proj")
        add("--model_style", choices=("hf", "megatron"), default="hf")
        for name in ("load_xser", "save_xser"):
            add(f"--{name}", type=_flag, default=False, help="accepted: files show how they are saved")
        return parser, parser.parse_known_args()[0]

    def run(self, args: argparse.Namespace) -> None:
        """Convert as ``args`` say. Raises CheckpointError, or ModelConfigError for numbers of heads that do not fit."""
        refused = {"ep_size": args.ep_size != 1, "convert_to_xser": args.convert_to_xser}
        refused |= {"convert_from_xser": args.convert_from_xser, "model_style": args.model_style != "hf"}
        if any(refused.values()):
            names = ", ".join(f"--{name}" for name, given in refused.items() if given)
            raise CheckpointError(f"{names}: only unsharded states of Hugging Face models are converted")
        if not args.input_dir or not args.output_dir:
            raise CheckpointError("pass --input_dir and --output_dir")
        if args.convert_from_full_state == args.convert_to_full_state:
            raise CheckpointError("pass either --convert_from_full_state or --convert_to_full_state")
        if args.convert_from_full_state:
            self.convert_from_full_state(args)
        else:
            self.convert_to_full_state(args)

    def convert_from_full_state(self, args: argparse.Namespace) -> None:
        """Write ``output_dir/model/dp_rank_00_tp_rank_00_pp_rank_00.pt`` and so on, one rank after the other."""
        state = self.pre_process_full_state_before_tp_conversion(self.load_full_state(args), args)
        layouts = self._layouts({name: tuple(tensor.shape) for name, tensor in state.items()}, args)
        for name, layout in layouts.items():
            for dim, plan in enumerate(layout.axes):
                plan.require_exact(args.tp_size, f"dimension {dim} of {name}")
        stages = self._stages(layouts, args)
        folder = Path(args.output_dir)
        (folder / "model").mkdir(parents=True, exist_ok=True)
        (folder / DONE).unlink(missing_ok=True)
        (folder / MARK).touch()  # of a folder that is complete only when it is done
        for tp in range(args.tp_size):
            tensors = dict(iter_shards(layouts, state, tp, args.tp_size))
            for pp in range(args.pp_size):
                own = {name: tensor for name, tensor in tensors.items() if stages[name] == pp}
                torch.save(own, folder / "model" / f"dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt")
        (folder / DONE).write_text("1")

    def convert_to_full_state(self, args: argparse.Namespace) -> None:
        """Write the unsharded state: the file ``output_dir``, or ``checkpoint.pt`` in that folder."""
        archive = ReferenceArchive(Path(args.input_dir))
        found = {axis: archive.degrees[axis] for axis in ("tp", "pp")}
        if found != {"tp": args.tp_size, "pp": args.pp_size}:
            raise CheckpointError(
                f"{args.input_dir} is of tp_size={found['tp']} and pp_size={found['pp']}, not of "
                f"{args.tp_size} and {args.pp_size}"
            )
        state: dict[str, Tensor] = {}
        for ranks in archive.stages():
            held = {name: tuple(tensor.shape) for name, tensor in ranks[0].items()}
            layouts = self._layouts(self._full_shapes(held, args), args)
            merged = MergedSource(ranks, {name: layouts[name] for name in held})
            state.update((name, merged.read(name)) for name in merged.names)
        self._stages(state, args)
        self.save_full_state(args, self.post_process_full_state_after_tp_conversion(state, args))

    def load_full_state(self, args: argparse.Namespace) -> dict[str, Tensor]:
        """Return the unsharded state in ``input_dir``: a file of torch.save, or safetensors."""
        path = Path(args.input_dir)
        if path.is_dir() or path.suffix == ".safetensors":
            source = as_source(path)
            return {name: source.read(name) for name in source.keys()}  # noqa: SIM118 (a source is not a mapping)
        state = read_pickle(path, mapped=True)
        state = state.get(args.model_key, state) if isinstance(state, Mapping) else state
        if not isinstance(state, Mapping) or not all(isinstance(item, Tensor) for item in state.values()):
            raise CheckpointError(f"{path} holds no state of a model, also not under --model_key {args.model_key}")
        return dict(state)

    def save_full_state(self, args: argparse.Namespace, state_dict: Mapping[str, Tensor]) -> None:
        """Store the unsharded state."""
        path = Path(args.output_dir)
        path = path if path.suffix in FILES else path / "checkpoint.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            save_file({name: tensor.contiguous() for name, tensor in state_dict.items()}, path)
        else:
            torch.save(dict(state_dict), path)

    # --- layouts --------------------------------------------------------------------------------------

    def _layouts(self, shapes: Shapes, args: argparse.Namespace) -> dict[str, ParamLayout]:
        """Return the layout of each tensor in the ranks' files, from the unsharded state's names and shapes."""
        layouts: dict[str, ParamLayout] = {}
        for name, shape in shapes.items():
            place, _, kind = name.rpartition(".")
            prefix, _, last = place.rpartition(".")
            parts = {part: f"{prefix}.{part}_proj.{kind}" for part in "qkv"}
            joined = args.qkv_linear or args.coalesce_qkv
            if joined and last in ("q_proj", "k_proj", "v_proj") and shapes.keys() >= set(parts.values()):
                queries, keys = self._heads(shapes[parts["q"]][0], shapes[parts["k"]][0], args)
                plans = {"q": queries, "k": keys, "v": keys}
                if args.coalesce_qkv or args.fuse_qkv:
                    own = f"{prefix}.qkv_proj.{kind}" + ("" if args.coalesce_qkv else "_qkv")
                    layouts[own] = ParamLayout.of([AxisPlan.fused(plans), *shape[1:]], parts)
                else:
                    own = f"{prefix}.qkv_proj.{kind}_{last[0]}"
                    layouts[own] = ParamLayout.of([plans[last[0]], *shape[1:]], name)
                continue
            axes: list[AxisPlan | int] = list(shape)
            dim = self.get_partition_dim(name)
            if dim is not None:
                axes[dim] = AxisPlan.strided(shape[dim], self.get_partition_stride(name))
                if joined and last == "o_proj" and args.kv_size_multiplier > 1:
                    axes[dim] = self._heads(shape[dim], None, args)[0]
            layouts[name] = ParamLayout.of(axes, name)
        return layouts

    def _heads(self, rows: int, kv_rows: int | None, args: argparse.Namespace) -> tuple[AxisPlan, AxisPlan]:
        """Return how query and key/value features are placed, where each key/value head is there several times.

        On trn2 the copies of a head are adjacent. On trn1 whole blocks of heads follow one another, and the query heads
        are in the order of the key/value heads that they read.
        """
        copies = args.kv_size_multiplier
        if copies == 1:
            return AxisPlan.even(rows), AxisPlan.even(kv_rows or rows)
        heads, kv_heads = self._numbers(args)
        group, dim = heads // (kv_heads * copies), rows // heads
        if heads % (kv_heads * copies) or rows % heads or (kv_rows or kv_heads * dim) != kv_heads * dim:
            raise ModelConfigError(
                f"{heads} query heads ({rows} features) and {kv_heads} key/value heads ({kv_rows} features) cannot be "
                f"placed with kv_size_multiplier={copies}"
            )
        blocks = [(head, copy) for copy in range(copies) for head in range(kv_heads)]
        if args.hw_backend != "trn1":
            blocks.sort()
        first = [(head * copies + copy) * group * dim for head, copy in blocks]
        return (
            AxisPlan.from_runs([Run("", at, at + group * dim) for at in first]),
            AxisPlan.from_runs([Run("", head * dim, (head + 1) * dim) for head, _ in blocks]),
        )

    def _numbers(self, args: argparse.Namespace) -> tuple[int, int]:
        """Return the numbers of query and key/value heads of the model's configuration."""
        beside = Path(args.input_dir)
        places = [Path(args.config)] if args.config else [beside / "config.json", beside.parent / "config.json"]
        places = [place / "config.json" if place.is_dir() else place for place in places]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise ModelConfigError("the numbers of heads are in the model's configuration: pass --config config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        return heads, config.get("num_key_value_heads") or heads

    def _full_shapes(self, held: Shapes, args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
        """Return the unsharded state's names and shapes, from those of a rank's file."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in held.items():
            place, _, kind = name.rpartition(".")
            kind, _, part = kind.partition("_")
            rows = shape[0] * args.tp_size if shape else 1
            if place.endswith("qkv_proj") and (args.qkv_linear or args.coalesce_qkv):
                prefix = place.removesuffix("qkv_proj")
                wide = {"q": 1, "k": args.kv_size_multiplier, "v": args.kv_size_multiplier}
                if part not in wide:
                    heads, kv_heads = self._numbers(args)
                    whole = rows // (heads + 2 * kv_heads * args.kv_size_multiplier)
                    sizes = {"q": whole * heads, "k": whole * kv_heads, "v": whole * kv_heads}
                else:
                    sizes = {part: rows // wide[part]}
                shapes |= {f"{prefix}{one}_proj.{kind}": (size, *shape[1:]) for one, size in sizes.items()}
                continue
            dim = self.get_partition_dim(name)
            shapes[name] = tuple(size * args.tp_size if at == dim else size for at, size in enumerate(shape))
        return shapes

    def _stages(self, names: Iterable[str], args: argparse.Namespace) -> dict[str, int]:
        """Return the pipeline stage of each tensor; each has as many layers, the first ones one more."""
        layers = {name: next((int(part) for part in name.split(".") if part.isdigit()), None) for name in names}
        count = 1 + max((layer for layer in layers.values() if layer is not None), default=-1)
        if args.n_layers not in (None, count):
            raise CheckpointError(f"--n_layers is {args.n_layers}, and the model has {count}")
        if args.pp_size > max(count, 1):
            raise CheckpointError(f"--pp_size {args.pp_size} is more than the model's {count} layers")
        each, more = divmod(count, args.pp_size)
        stage_of = [stage for stage in range(args.pp_size) for _ in range(each + (stage < more))]
        outside = {name: 0 if any(one in name for one in EMBEDDINGS) else args.pp_size - 1 for name in layers}
        return {name: outside[name] if layer is None else stage_of[layer] for name, layer in layers.items()}
