// Executes with pointers that lead nowhere; says what the kernel says to each.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

// Volatile, so that no compiler looks through it.
static char *volatile low = (char *)16;

static void said(const char *what, int answer) { printf("%s: %d %s\n", what, answer, strerror(errno)); }

int main(void) {
    char *nowhere = low;
    char *const good[] = {"true", NULL}, *const with_bad[] = {"true", nowhere, NULL};
    char **const bad = (char **)4096;
    // A string that goes to the end of its memory.
    char *memory = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(memory, 'x', 8192);
    munmap(memory + 4096, 4096);
    char *const no_end = memory + 4090, *const with_no_end[] = {"true", no_end, NULL};
    int fd = open("/bin/true", O_PATH);

    setvbuf(stdout, NULL, _IONBF, 0);
    said("execve path", execve(low, good, environ));
    said("execve path without end", execve(no_end, good, environ));
    said("execve words", execve("/bin/true", bad, environ));
    said("execve a word", execve("/bin/true", with_bad, environ));
    said("execve a word without end", execve("/bin/true", with_no_end, environ));
    said("execve variables", execve("/bin/true", good, bad));
    said("execve a variable", execve("/bin/true", good, with_bad));
    said("execv words", execv("/bin/true", bad));
    said("execvp words", execvp("true", with_bad));
    said("execvpe variables", execvpe("true", good, bad));
    said("fexecve words", fexecve(fd, with_no_end, environ));
    said("execveat path", execveat(AT_FDCWD, low, good, environ, 0));
    said("execveat words", execveat(fd, "", with_bad, environ, AT_EMPTY_PATH));
    pid_t child;
    int answer = posix_spawn(&child, "/bin/true", NULL, NULL, good, bad);
    printf("posix_spawn variables: %s\n", strerror(answer));
    answer = posix_spawn(&child, low, NULL, NULL, good, environ);
    printf("posix_spawn path: %s\n", strerror(answer));
    return 0;
}
