/* Forks while many threads are about to execute: forks FORKS PROGRAM FILE. Each child executes the program with the file.
 * Prints how many ended with 9. */
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
enum { THREADS = 16 };
static atomic_int ends, running;

static void *spawns(void *unused) {
    (void)unused;
    char *words[] = {"true", NULL};
    while (!ends) {
        pid_t pid;
        running++;
        if (!posix_spawn(&pid, "/usr/bin/true", NULL, NULL, words, environ)) waitpid(pid, NULL, 0);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, spawns, NULL);
    while (running < 2 * THREADS) usleep(1000);
    int seen = 0;
    for (int i = atoi(argv[1]); i > 0; i--) {
        int status = 0, pid = fork();
        if (!pid) {
            execl(argv[2], "cat", argv[3], NULL);
            _exit(99);
        }
        waitpid(pid, &status, 0);
        seen += WIFEXITED(status) && WEXITSTATUS(status) == 9;
    }
    ends = 1;
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    printf("%d\n", seen);
    return 0;
}
