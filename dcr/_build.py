"""Written by CMakeLists.txt: whether dcr._native was built."""

NATIVE = True
