# The commands of the project. Each one sets up what it needs (scripts/setup.sh) and then does its work; the
# build itself is CMake's, in build/.
#
#   make            library and program: build/logitless, build/liblogitless.so, build/liblogitless.a
#   make demo       trains a small language model, scores held-out text (TEXT="FILE..." for other text)
#   make test       every check of the project; ONLY="STAGE..." for some of them (see scripts/test.sh)
#   make bench      the program's benchmark (PROBLEMS="..." for other problems)
#   make install    to PREFIX (/usr/local), below DESTDIR if set
#   make format     clang-format on our C files         make lint    static analyser
#   make clean
#
# JOBS=N limits the processes that build and test at once; CC=... names the compiler of a first build.
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
export JOBS

.PHONY: all demo test bench install format lint clean setup
all: setup
	@scripts/build.sh build

setup:
	@scripts/setup.sh build

demo: all
	@scripts/demo.sh $(TEXT)

test:
	@scripts/setup.sh test
	@scripts/test.sh $(ONLY)

bench: all
	@build/logitless bench $(PROBLEMS)

install: all
	cmake --install build --prefix $(PREFIX)

format:
	@scripts/format.sh

lint:
	@scripts/setup.sh test
	@scripts/build.sh build -DLL_BUILD_TESTS=ON
	@scripts/lint.sh build

clean:
	rm -rf build
