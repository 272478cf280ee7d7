"""Tests that need a CUDA device; a package, so that its conftest is not mistaken for that of tests."""
