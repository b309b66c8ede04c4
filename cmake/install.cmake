# What `cmake --install` puts where: headers, both libraries, the program, and the two ways to find them
# (find_package(logitless), pkg-config logitless). Both are relative to themselves: the tree may be moved.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/logitless)

install(DIRECTORY include/logitless DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(TARGETS logitless logitless_static EXPORT logitless-targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT logitless-targets NAMESPACE logitless:: DESTINATION ${package_dir})
if(TARGET logitless_cli)
    install(TARGETS logitless_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

configure_package_config_file(cmake/logitless-config.cmake.in ${PROJECT_BINARY_DIR}/cmake/logitless-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/logitless-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cmake/logitless-config.cmake
              ${PROJECT_BINARY_DIR}/cmake/logitless-config-version.cmake
        DESTINATION ${package_dir})

set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH prefix_from_pkgconfig /prefix/${pkgconfig_dir} /prefix)
string(REGEX REPLACE "/$" "" prefix_from_pkgconfig "${prefix_from_pkgconfig}")
configure_file(cmake/logitless.pc.in ${PROJECT_BINARY_DIR}/cmake/logitless.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cmake/logitless.pc DESTINATION ${pkgconfig_dir})
