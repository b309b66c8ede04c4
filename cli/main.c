/* logitless, the program: finds the command and hands over. */
#define _POSIX_C_SOURCE 200809L
#include "cli.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const struct {
    const char *name, *about;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"score", "loss, log-probs and entropy of hidden states in files", ll_cmd_score},
    {"train", "a small language model on text files, to see the loss fall", ll_cmd_train},
    {"check", "right numbers on the ranks of a group, by threads or MPI", ll_cmd_check},
    {"bench", "speed of the kernels on this machine", ll_cmd_bench},
    {"info", "what was built, what this machine can run, and why not the rest", ll_cmd_info},
};
enum { kCommands = sizeof commands / sizeof commands[0] };

static void print_help(void) {
    printf("usage: logitless COMMAND [options]\n\n"
           "Loss and log-probabilities of a language-model head without the logits.\n\ncommands:\n");
    for (int i = 0; i < kCommands; i++) printf("  %-8s %s\n", commands[i].name, commands[i].about);
    printf("\noptions:\n"
           "  --help     print this text; logitless COMMAND --help explains a command\n"
           "  --version  print the version\n\n"
           "exit codes: 0 fine; 1 a check failed; 2 bad usage or input; 3 run-time failure\n");
}

/* An input file that is cut while it is mapped ends reads with SIGBUS; only write and _exit are safe. */
static void on_bus_error(int number) {
    static const char line[] = "logitless: an input file became shorter or unreadable while it was read\n";
    (void)number;
    if (write(STDERR_FILENO, line, sizeof line - 1) < 0) _exit(CLI_EXIT_RUNTIME);
    _exit(CLI_EXIT_RUNTIME);
}

static void set_signals(void) {
    struct sigaction action = {.sa_handler = on_bus_error};
    sigaction(SIGBUS, &action, NULL);
    /* A file size limit must be a failed write, reported and cleaned up, and not the end of the process. */
    action.sa_handler = SIG_IGN;
    sigaction(SIGXFSZ, &action, NULL);
}

static int run_command(int argc, char **argv) {
    if (argc < 2) return cli_fail(CLI_EXIT_USAGE, "found no command; see logitless --help");
    if (strcmp(argv[1], "--help") == 0) {
        print_help();
        return CLI_EXIT_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("logitless %s\n", ll_version());
        return CLI_EXIT_OK;
    }
    for (int i = 0; i < kCommands; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) return commands[i].run(argc - 1, argv + 1);
    }
    return cli_fail(CLI_EXIT_USAGE, "unknown %s \"%s\"; see logitless --help",
                    argv[1][0] == '-' ? "option" : "command", argv[1]);
}

int main(int argc, char **argv) {
    set_signals();
    int code = run_command(argc, argv);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        if (code == CLI_EXIT_OK) code = cli_fail(CLI_EXIT_RUNTIME, "stdout: the output could not be written");
    }
    return code;
}
