/* Executes a program by a function of the exec family from a child that shares this process's memory
 * (clone(2) with CLONE_VM and CLONE_VFORK) and runs on a stack of its own, as container tools do. What the
 * child wrote is read from a pattern that lies on the stack and below it.
 *
 * small_stack FUNCTION KIB REPEAT PROGRAM WORD...
 *
 * Prints: the function, the status of each child, how many bytes below the stack were overwritten, how many mappings this
 * process has more than after the first child; and on descriptor 9, if that is open, how many bytes of the stack were
 * used. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
enum { BELOW = 512 << 10, PATTERN = 0x5a };
static const char *function, *program;
static char **words;
static int failed, descriptor;

static int is(const char *name) { return !strcmp(function, name); }

static int child(void *unused) {
    (void)unused;
    failed = 0;
    if (is("execve")) execve(program, words, environ);
    if (is("execv")) execv(program, words);
    if (is("execvp")) execvp(program, words);
    if (is("execvpe")) execvpe(program, words, environ);
    if (is("execl")) execl(program, words[0], words[1], words[2], NULL);
    if (is("execl-long")) execl(program, words[0], words[1], words[2], words[2], words[2], words[2], words[2], NULL);
    if (is("execlp")) execlp(program, words[0], words[1], words[2], NULL);
    if (is("execle")) execle(program, words[0], words[1], words[2], NULL, environ);
    if (is("fexecve")) fexecve(descriptor, words, environ);
    if (is("execveat")) execveat(AT_FDCWD, program, words, environ, 0);
    if (is("execveat-fd")) execveat(descriptor, "", words, environ, AT_EMPTY_PATH);
    if (is("posix_spawn") || is("posix_spawnp")) {
        pid_t pid;
        int status = 0;
        int error = is("posix_spawn") ? posix_spawn(&pid, program, NULL, NULL, words, environ)
                                      : posix_spawnp(&pid, program, NULL, NULL, words, environ);
        if (!error) {
            waitpid(pid, &status, 0);
            _exit(WEXITSTATUS(status));
        }
        errno = error;
    }
    failed = errno;
    _exit(99);
}

static int mappings(void) {
    char line[4096];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps)) count += !strstr(line, "[heap]");
    fclose(maps);
    return count;
}

int main(int argc, char **argv) {
    if (argc < 6) return 2;
    function = argv[1], program = argv[4], words = argv + 5;
    size_t size = strtoul(argv[2], NULL, 10) << 10;
    /* As malloc(3) gives it: nothing guards what lies below. */
    char *area = malloc(size + BELOW), *stack = area + BELOW;
    descriptor = open(program, O_RDONLY);
    size_t below = 0;
    int first = 0, last = 0;
    printf("%s %s:", function, argv[2]);
    for (int count = atoi(argv[3]); count > 0; count--) {
        memset(area, PATTERN, size + BELOW);
        fflush(stdout);
        int status = 0, pid = clone(child, stack + size - 64, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
        waitpid(pid, &status, 0);
        size_t unused = 0;
        for (size_t i = 0; i < BELOW; i++) below += area[i] != PATTERN;
        while (unused < size + BELOW && area[unused] == PATTERN) unused++;
        last = mappings();
        if (!first) first = last;
        dprintf(9, "%s %zu\n", function, size + BELOW - 64 - unused);
        printf(" %x/%d", status, failed);
    }
    printf(", overwritten %zu, mappings %d\n", below, last - first);
    return 0;
}
