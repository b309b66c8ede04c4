# `logitless train` from outside.
add_test(NAME cli_train COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/train.sh $<TARGET_FILE:logitless_cli>)
set_tests_properties(cli_train PROPERTIES TIMEOUT 300)
