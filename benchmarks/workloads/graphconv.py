"""A graph convolution on molecules (Lipophilicity): rounds of messages between bonded atoms, then one number.

    start    h = the vector of the atom's element
    round    h = relu(own(h) + around(sum of the neighbours' h))
    end      guess = out(sum of all h / 10)          loss = (guess - target)^2 / 2
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .base import Product, Workload, chosen, lookup_table, random_parameters

DEFAULTS = {"batch": 64, "hidden": 128, "rounds": 3}
GENERATED_ATOMS = 20
SCALE = 0.1                     # of the sum over a molecule's atoms
TOKENS = re.compile(r"(\[[^\]]+\]|Br|Cl|[BCNOPSFIbcnops])|(%\d\d|\d)|([().])|[-=#:/\\$]")
ELEMENT = re.compile(r"[A-Z][a-z]?|[a-z]+")     # the first in [13C@@H], [nH], [Na+]


@dataclass
class Molecule:
    atoms: list[int]
    neighbours: list[list[int]]
    target: float


def parse(smiles: str) -> tuple[list[str], list[list[int]]]:
    """The atoms of a SMILES string, hydrogens left out, and the neighbours of each."""
    atoms: list[str] = []
    neighbours: list[list[int]] = []
    rings: dict[str, int] = {}
    branches: list[int] = []
    last = -1

    def bond(a: int, b: int) -> None:
        neighbours[a].append(b)
        neighbours[b].append(a)

    for atom, ring, sign in TOKENS.findall(smiles):
        if atom:
            atoms.append(ELEMENT.findall(atom)[0])
            neighbours.append([])
            if last >= 0:
                bond(last, len(atoms) - 1)
            last = len(atoms) - 1
        elif ring in rings:
            bond(rings.pop(ring), last)
        elif ring:
            rings[ring] = last
        elif sign == "(":
            branches.append(last)
        elif sign == ")":
            last = branches.pop()
        elif sign == ".":
            last = -1
    return atoms, neighbours


def read(data: Path, count: int) -> tuple[list[Molecule], int]:
    """Molecules, and the number of different elements."""
    with open(data / "molecules" / "Lipophilicity.csv", encoding="utf-8") as file:
        rows = [(*parse(row["smiles"].strip()), float(row["exp"])) for row in csv.DictReader(file)]
    table = lookup_table([atom for atoms, _, _ in rows for atom in atoms])
    return [Molecule([table[atom] for atom in atoms], neighbours, target)
            for atoms, neighbours, target in chosen(rows, count)], len(table)


def generate(count: int) -> tuple[list[Molecule], int]:
    """Molecules with the sizes of the real ones: 27 atoms on average, chains with branches and some rings."""
    rng = np.random.RandomState(0)
    molecules = []
    for size in np.clip(rng.normal(27, 7.5, count), 7, 115).astype(int):
        neighbours: list[list[int]] = [[] for _ in range(size)]
        bonds = [(v, max(0, v - int(rng.randint(1, 3)))) for v in range(1, size)]
        bonds += [(v, v - 5) for v in range(5, size, 8)]
        for a, b in bonds:
            neighbours[a].append(b)
            neighbours[b].append(a)
        atoms = rng.zipf(1.5, size) % GENERATED_ATOMS
        molecules.append(Molecule(atoms.tolist(), neighbours, float(rng.normal(2, 1))))
    return molecules, GENERATED_ATOMS


def make(options: dict[str, int], num_batches: int, data: Path | None) -> Workload:
    count = num_batches * options["batch"]
    molecules, num_atoms = generate(count) if data is None else read(data, count)
    hidden, rounds = options["hidden"], options["rounds"]
    params = random_parameters({"embed_weight": (num_atoms, hidden), "own_weight": (hidden, hidden),
                                "own_bias": (hidden,), "around_weight": (hidden, hidden),
                                "out_weight": (1, hidden), "out_bias": (1,)})

    def products(batch: list[Molecule]) -> list[Product]:
        atoms = sum(len(molecule.atoms) for molecule in batch)
        return [(atoms, hidden, hidden)] * (2 * rounds) + [(len(batch), hidden, 1)]

    return Workload(molecules, params, products, real=data is not None, learning_rate=0.01)
