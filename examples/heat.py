"""Heat in a plate, split over the ranks of a Cartesian communicator, whose halos travel compressed.

    mpiexec -n 4 python examples/heat.py
    mpiexec -n 4 python examples/heat.py --policy int8 --out plate.npy
    mpiexec -n 4 python examples/heat.py --policy none            # for comparison

A program of mpi4py's, with one line of ours [1]. A communicator is one of MPI's in all it does: rank 0 broadcasts the
settings as a pickled object [2], ranks stand in a grid [3], each adds its heat to a window on rank 0's memory [4], and
all write their squares to one file [5], in NumPy's format. The edges of the squares go to the neighbours in a
`Neighbor_alltoall` [6], which the policy compresses: an edge takes more than the 4 KiB that a codec leaves as they are.
With `bounded:abs=E` no halo is off by more than E, and no temperature by more than 0.4 E a step.
"""

import argparse
import io

import numpy as np
from mpi4py import MPI

import hybridcomp as hc


def hot_disc(grid: MPI.Cartcomm, edge: int) -> np.ndarray:
    """Make this rank's square of the plate, float32 [edge + 2, edge + 2] with halos: 1 in a disc, 0 around it."""
    y, x = (
        np.linspace(-1, 1, ranks * edge, dtype=np.float32)[at * edge : (at + 1) * edge]
        for ranks, at in zip(grid.dims, grid.coords, strict=True)
    )
    return np.pad((y[:, None] ** 2 + x**2 < 0.25).astype(np.float32), 1)


def step(grid: MPI.Cartcomm, cells: np.ndarray) -> None:
    """Have heat flow between the cells of this rank's square and those around it; outside of the plate it is cold."""
    edges = np.stack([cells[1, 1:-1], cells[-2, 1:-1], cells[1:-1, 1], cells[1:-1, -2]])
    halos = np.zeros_like(edges)
    grid.Neighbor_alltoall(edges, halos)  # [6]
    cells[0, 1:-1], cells[-1, 1:-1], cells[1:-1, 0], cells[1:-1, -1] = halos
    around = cells[:-2, 1:-1] + cells[2:, 1:-1] + cells[1:-1, :-2] + cells[1:-1, 2:]
    cells[1:-1, 1:-1] += np.float32(0.2) * (around - 4 * cells[1:-1, 1:-1])


def save(grid: MPI.Cartcomm, cells: np.ndarray, path: str) -> None:
    """Write the plate to one file, float32 [rows of ranks * edge, columns of ranks * edge], for numpy.load."""
    edge = len(cells) - 2
    shape = tuple(ranks * edge for ranks in grid.dims)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    file = MPI.File.Open(grid, path, MPI.MODE_CREATE | MPI.MODE_WRONLY)  # [5]
    file.Set_size(0)
    if grid.rank == 0:
        file.Write_at(0, header.getvalue())
    square = MPI.FLOAT.Create_subarray(shape, (edge, edge), [at * edge for at in grid.coords]).Commit()
    file.Set_view(len(header.getvalue()), MPI.FLOAT, square)
    file.Write_all(np.ascontiguousarray(cells[1:-1, 1:-1]))
    file.Close()
    square.Free()


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--policy", default="bounded:abs=1e-4", help="a preset, a TOML file, or a codec")
    parser.add_argument("--edge", type=int, default=2048, help="cells on a side of a rank's square")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", help="file to write the plate to")
    args = parser.parse_args()

    comm = hc.Communicator(MPI.COMM_WORLD, policy=args.policy)  # [1] was: comm = MPI.COMM_WORLD
    rank = comm.rank
    args = comm.bcast(args)  # [2]
    grid = comm.Create_cart(MPI.Compute_dims(comm.size, 2))  # [3]
    cells = hot_disc(grid, args.edge)
    window = MPI.Win.Allocate(8 if rank == 0 else 0, comm=grid)  # [4]
    total = np.frombuffer(window.tomemory(), np.float64)

    for done in range(args.steps):
        step(grid, cells)
        if (done + 1) % max(1, args.steps // 5) == 0:
            total[:] = 0
            window.Fence()
            window.Accumulate(np.array([cells[1:-1, 1:-1].sum(dtype=np.float64)]), 0)
            window.Fence()
            if rank == 0:
                print(f"step {done + 1}: heat {total[0]:.3f}")
    window.Free()

    if args.out:
        save(grid, cells, args.out)
    sent = np.array([[row.wire_bytes, row.plain_bytes] for row in grid.stats()]).sum(0)
    wire, plain = comm.allreduce(sent / 1e6)
    if rank == 0:
        print(f"sent {wire:.2f} MB in the place of {plain:.2f} MB")
    grid.Free()
    comm.Free()


if __name__ == "__main__":
    main()
