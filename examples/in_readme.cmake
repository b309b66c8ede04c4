# The README shows the example as it is: cmake -DREADME=... -DEXAMPLE=... -P in_readme.cmake
file(READ "${README}" readme)
file(READ "${EXAMPLE}" example)
string(FIND "${readme}" "${example}" position)
if(position EQUAL -1)
    message(FATAL_ERROR "README.md does not hold examples/minimal.c word for word")
endif()
