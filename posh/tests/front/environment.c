/* Starts shells by system(3) and popen(3) while other threads read and change the environment: they find in it what
 * they have put there, and nothing else. Prints what the shells say, and what was found. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char **environ;
static atomic_int ends, strange;

static void *reads(void *unused) {
    (void)unused;
    char **array = environ;
    while (!ends) strange += environ != array || getenv("LD_PRELOAD") || getenv("POSH_HOOK") || !getenv("HOME");
    return NULL;
}

static void *writes(void *unused) {
    (void)unused;
    char value[32];
    for (unsigned i = 0; !ends; i++) {
        snprintf(value, sizeof value, "%u", i % 100);
        setenv("CHANGES", value, 1);
        strange += strcmp(getenv("CHANGES"), value) != 0;
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    setenv("CHANGES", "0", 1);
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, reads, NULL);
    pthread_create(&threads[1], NULL, writes, NULL);
    for (int count = atoi(argv[1]); count > 0; count--) {
        printf("%x\n", system(argv[2]));
        fflush(stdout);
        FILE *shell = popen(argv[2], "r");
        char line[256];
        while (fgets(line, sizeof line, shell)) printf("<%s", line);
        printf("%x\n", pclose(shell));
        fflush(stdout);
    }
    ends = 1;
    pthread_join(threads[0], NULL), pthread_join(threads[1], NULL);
    printf("strange %d, none %d\n", strange, system(NULL));
    return 0;
}
