from ._ffi import ArgumentError, Error
