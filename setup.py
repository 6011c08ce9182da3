"""Everything is in pyproject.toml but this: the examples of the checkout travel inside the package."""

from setuptools import find_packages, setup

setup(packages=[*find_packages("src"), "stepcast.examples"])
