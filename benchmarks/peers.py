"""The implementations that are compared, behind one call: ours, and the peers that happen to be installed.

Every implementation computes the same product up to the order of channels, paths and output slots and up to a factor
per path. It therefore says what each element of its x, w and z is (`labels`), and the check against the reference
reorders by that: each library is timed in the layout that is native to it.

Peers: cuEquivariance (``cue``: uniform_1d with its fused gather and scatter), OpenEquivariance (``oeq`` with atomics,
``oeq_det`` without), e3j (``e3j``: its Mosaic GPU kernel, float32 only) and e3nn-jax (``e3nn``: gather, tensor product,
segment_sum, jitted).
"""

import ctypes
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import e3nn_jax as e3nn
import jax
import numpy as np
from workloads import Product

Apply = Callable[..., jax.Array]


@dataclass(frozen=True)
class Convolution:
    """One implementation of one product.

    Attributes:
        name: the implementation.
        apply: ``(x, y, w, *indices) -> z``, with ``x: [nodes, x_dim]``, ``y: [edges, y_dim]``, ``w: [edges, w_dim]``
            and ``z: [nodes, z_dim]``.
        labels: for the slots x, w and z, an array ``[dim, 3]`` that says which (block or path, component, channel)
            each element is.
        indices: the index arrays that ``apply`` wants, made once from senders and receivers.
    """

    name: str
    apply: Apply
    labels: dict[str, np.ndarray]
    indices: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]] = lambda senders, receivers: (
        senders,
        receivers,
    )


def labelled(blocks: Sequence[tuple[int, int, int]], layout: str, group: int = 1) -> np.ndarray:
    """Labels of a row that is a sequence of blocks.

    Args:
        blocks: (key, multiplicity, components) of each block in memory order.
        layout: "mul_ir", "ir_mul", or "copies": multiplicity split into copies of ``group`` channels, each copy in
            component-major order.
        group: channels of a copy.

    Returns:
        int array ``[dim, 3]``: key, component, channel.
    """
    rows = []
    for key, mul, dim in blocks:
        if layout == "copies":
            copy, component, channel = np.meshgrid(
                np.arange(mul // group), np.arange(dim), np.arange(group), indexing="ij"
            )
            channel = copy * group + channel
        elif layout == "ir_mul":
            component, channel = np.meshgrid(np.arange(dim), np.arange(mul), indexing="ij")
        else:
            channel, component = np.meshgrid(np.arange(mul), np.arange(dim), indexing="ij")
        rows.append(np.stack([np.full(channel.size, key), component.ravel(), channel.ravel()], axis=1))
    return np.concatenate(rows)


def slot_labels(
    product: Product, weight_order: Sequence[int], slot_order: Sequence[int], layout: str, group: int = 1
) -> dict[str, np.ndarray]:
    """Labels of x, w and z when the paths lie in these orders (numbers into ``product.paths``)."""
    blocks = [(i, mul, ir.dim) for i, (mul, ir) in enumerate(e3nn.Irreps(product.in1))]
    weights = [(p, product.paths[p][3], 1) for p in weight_order]
    slots = [(p, product.paths[p][3], product.paths[p][2].dim) for p in slot_order]
    return {
        "x": labelled(blocks, layout, group),
        "w": labelled(weights, "mul_ir"),
        "z": labelled(slots, layout, group),
    }


def _described(tp: Any, product: Product) -> dict[str, np.ndarray]:
    """Labels of a jaxcg.TensorProduct, from its own list of instructions."""
    number = {(first, second, ir): p for p, (first, second, ir, _) in enumerate(product.paths)}
    paths = [(number[i1, i2, tp.irreps_out[i_out].ir], i_out) for i1, i2, i_out, *_ in tp.instructions]
    weight_order = [p for p, _ in paths]
    slot_order = [p for p, _ in sorted(paths, key=lambda path: path[1])]
    return slot_labels(product, weight_order, slot_order, tp.layout)


def jaxcg(
    product: Product,
    dtype: str,
    nodes: int,
    layout: Literal["mul_ir", "ir_mul"] = "ir_mul",
    impl: Literal["cuda", "xla"] = "cuda",
    options: Sequence[str] = ("receivers_sorted",),
) -> Convolution:
    """Ours, with some options of `convolve` on. It takes an order of edges after the indices."""
    from jaxcg import EdgeOrder, TensorProduct

    tp = TensorProduct.channelwise(product.in1, product.in2, product.out, layout=layout)
    flags: dict[str, Any] = dict.fromkeys(options, True)

    def apply(
        x: jax.Array, y: jax.Array, w: jax.Array, senders: jax.Array, receivers: jax.Array, *orders: jax.Array
    ) -> jax.Array:
        order = EdgeOrder(*orders) if orders else None
        return tp.convolve(x, y, w, senders, receivers, num_nodes=nodes, edge_order=order, impl=impl, **flags)

    return Convolution("jaxcg", apply, _described(tp, product))


def e3nn_jax(product: Product, dtype: str, nodes: int) -> Convolution:
    """Gather, e3nn_jax.tensor_product with a filter, one weight for each irrep of its output, segment_sum."""
    in1, in2 = e3nn.Irreps(product.in1), e3nn.Irreps(product.in2)
    kept = [term.ir for term in e3nn.Irreps(product.out)]

    def apply(x: jax.Array, y: jax.Array, w: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        gathered = e3nn.IrrepsArray(in1, x[senders])
        messages = e3nn.tensor_product(gathered, e3nn.IrrepsArray(in2, y), filter_ir_out=kept) * w
        return jax.ops.segment_sum(messages.array, receivers, nodes, indices_are_sorted=True)

    # It sorts both inputs before it forms the paths, then the output.
    keys = [(ir, in1[first].ir, in2[second].ir) for first, second, ir, _ in product.paths]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return Convolution("e3nn", apply, slot_labels(product, order, order, "mul_ir"))


def cuequivariance(product: Product, dtype: str, nodes: int, method: str = "uniform_1d") -> Convolution:
    """cuEquivariance; its kernel wants one multiplicity, so ragged ones are split to their greatest divisor."""
    load_toolkit_libraries()
    import cuequivariance as cue
    import cuequivariance_jax as cuex

    in1, in2, out = (cue.Irreps("O3", irreps) for irreps in (product.in1, product.in2, product.out))
    described = cue.descriptors.channelwise_tensor_product(in1, in2, [ir for _, ir in out])
    polynomial = described.squeeze_modes().flatten_coefficient_modes().polynomial
    muls = [mul for mul, _ in in1]
    if len(set(muls)) > 1:
        divisor = math.gcd(*muls)
        polynomial = polynomial.apply_fn(lambda operand, terms: (operand, terms.split_mode("u", divisor)))

    def apply(x: jax.Array, y: jax.Array, w: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct((nodes, polynomial.outputs[0].size), x.dtype)
        where = [None, senders, None, receivers]
        return cuex.segmented_polynomial(polynomial, [w, x, y], [result], indices=where, method=method)[0]

    slots = cue.Irreps("O3", [(mul, str(ir)) for _, _, ir, mul in product.paths]).sort()
    order = [int(p) for p in slots.inv]
    return Convolution("cue", apply, slot_labels(product, order, order, "ir_mul"))


def openequivariance(product: Product, dtype: str, nodes: int, deterministic: bool = False) -> Convolution:
    """OpenEquivariance, from the same instruction list as MACE's: weights by output slot, torch's order of irreps."""
    os.environ["OEQ_NOTORCH"] = "1"
    load_toolkit_libraries()
    import openequivariance as oeq

    from jaxcg import TensorProduct

    scalar = {"float32": np.float32, "float64": np.float64}[dtype]
    tp = TensorProduct.channelwise(
        product.in1, product.in2, product.out, layout="mul_ir", weight_order="slot", irrep_order="torch"
    )
    problem = oeq.TPProblem(
        str(tp.irreps_in1),
        str(tp.irreps_in2),
        str(tp.irreps_out),
        [tuple(instruction[:5]) for instruction in tp.instructions],
        internal_weights=False,
        shared_weights=False,
        irrep_dtype=scalar,
        weight_dtype=scalar,
    )
    convolution = oeq.jax.TensorProductConv(problem, deterministic=deterministic)
    labels = _described(tp, product)
    numbered = convolution.reorder_weights_from_e3nn(np.arange(tp.weight_numel, dtype=np.float64)[None])
    labels["w"] = labels["w"][np.asarray(numbered)[0].astype(np.int64)]

    def apply(x: jax.Array, y: jax.Array, w: jax.Array, *indices: jax.Array) -> jax.Array:
        senders, receivers, *by_sender = indices
        return convolution(x, y, w, receivers, senders, *by_sender)

    def indices(senders: np.ndarray, receivers: np.ndarray) -> tuple[np.ndarray, ...]:
        by_sender = (np.lexsort((receivers, senders)).astype(np.int32),) if deterministic else ()
        return (senders, receivers, *by_sender)

    return Convolution("oeq_det" if deterministic else "oeq", apply, labels, indices)


def e3j(product: Product, dtype: str, nodes: int, method: str = "FUSED_MOSAIC_GPU") -> Convolution:
    """e3j; channels are the greatest common divisor of the multiplicities, the rest are copies of an irrep."""
    from e3j.core.convolution import Convolution as E3jConvolution
    from e3j.spaces import O3Space
    from e3j.utils.config import Config

    if dtype != "float32" and method == "FUSED_MOSAIC_GPU":
        raise ValueError("e3j's Mosaic GPU kernel is float32 only")
    terms = [(mul, ir) for mul, ir in e3nn.Irreps(product.in1)]
    channels = math.gcd(*(mul for mul, _ in terms))
    in1 = O3Space("+".join(f"{mul // channels}x{ir}" for mul, ir in terms))
    convolution = E3jConvolution(
        (in1, O3Space(product.in2)),
        O3Space(product.out),
        graph_ordering="RECEIVER",
        config=Config(convolution=method, tensor_product="UNFUSED"),
    )

    def apply(x: jax.Array, y: jax.Array, w: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        nodes_in, scalars = x.reshape(x.shape[0], -1, channels), w.reshape(w.shape[0], -1, channels)
        return convolution(nodes_in, y, scalars, senders, receivers).reshape(nodes, -1)

    order = sorted(range(len(product.paths)), key=lambda p: product.paths[p][2])
    return Convolution("e3j", apply, slot_labels(product, order, order, "copies", channels))


IMPLEMENTATIONS: dict[str, Callable[[Product, str, int], Convolution]] = {
    "jaxcg": jaxcg,
    "jaxcg_mul_ir": lambda product, dtype, nodes: jaxcg(product, dtype, nodes, layout="mul_ir"),
    "jaxcg_xla": lambda product, dtype, nodes: jaxcg(product, dtype, nodes, impl="xla"),
    "e3nn": e3nn_jax,
    "cue": cuequivariance,
    "cue_naive": lambda product, dtype, nodes: cuequivariance(product, dtype, nodes, method="naive"),
    "oeq": openequivariance,
    "oeq_det": lambda product, dtype, nodes: openequivariance(product, dtype, nodes, deterministic=True),
    "e3j": e3j,
    "e3j_unfused": lambda product, dtype, nodes: e3j(product, dtype, nodes, method="UNFUSED"),
}


def is_ours(name: str) -> bool:
    """Whether an implementation is this library's."""
    return name.startswith("jaxcg")


def load_toolkit_libraries() -> None:
    """Loads the CUDA libraries that come as Python packages, for extensions that only know a toolkit's folder."""
    spec = importlib.util.find_spec("nvidia.cu13")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for library in ("libcudart.so.13", "libnvrtc.so.13", "libcublasLt.so.13", "libcublas.so.13"):
            path = Path(folder) / "lib" / library
            if path.exists():
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
