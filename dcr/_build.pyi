"""Written by the build (CMakeLists.txt): whether dcr._native was built."""

NATIVE: bool
