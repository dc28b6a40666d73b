"""The conformance kit over this loader: `pytest test_arrays.py`."""

from dcr_arrays import ArrayLoader, Weight

import dcr.testing
from dcr.layout.schema import WIDTHS


class TestArrays(dcr.testing.LoaderTests):
    dtypes = tuple(WIDTHS)

    def make(self, weights):
        engine = {name: Weight(weight.dtype, weight.bits.copy()) for name, weight in weights.items()}
        return engine, ArrayLoader(engine)

    def raw(self, engine):
        return {name: weight.bits.tobytes() for name, weight in engine.items()}

    def pointers(self, engine):
        return {name: weight.bits.ctypes.data for name, weight in engine.items()}

    def write(self, engine, name, bits):
        engine[name].bits.reshape(-1)[:] = bits

    def move(self, engine, name):
        engine[name].bits = engine[name].bits.copy()
