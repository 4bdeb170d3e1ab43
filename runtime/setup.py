"""The part of the build that pyproject.toml cannot say: the C core is made by cffi."""

from setuptools import setup

setup(cffi_modules=["src/tandem_runtime/fabric/build.py:ffibuilder"])
