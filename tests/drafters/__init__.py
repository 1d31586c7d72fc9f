"""Tests of the drafters that come with the package, and of the registry for others."""
