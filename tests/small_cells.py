"""Vertex functions of a few lines."""

import cavs_core as cavs


def function(vertex, states=((2,),), setup=None, **options):
    """A VertexFunction from a plain function."""
    class Cell(cavs.VertexFunction):
        def __init__(self):
            super().__init__(state_shapes=list(states), **options)
            if setup:
                with self.name_scope():
                    setup(self)

        def vertex(self, F, v):
            vertex(self, F, v)

    cell = Cell()
    cell.initialize()
    return cell


def counter(self, F, v):
    """h = 1 + sum of the children's h: the size of the tree below."""
    (below,) = v.gather_sum()
    h = below + 1
    v.scatter(h)
    v.push(h)


SUM_TREE = cavs.InputGraph.from_parents([2, 2, 4, 4, -1])
