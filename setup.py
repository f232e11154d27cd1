"""The metadata is in pyproject.toml; this file adds the part that is compiled."""

from glob import glob

from setuptools import Extension, setup

# Optional: without a C compiler the package works as well, and takes several times as long to record a call.
setup(ext_modules=[Extension("gluon_dynbatch._fastpath", ["gluon_dynbatch/_fastpath.c"],
                             depends=glob("gluon_dynbatch/compiled/*.h"), optional=True)])
