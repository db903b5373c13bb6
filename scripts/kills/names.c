/* Stand before libc's calls that change a name: count those below a folder, and kill or fail at one of them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static char root[PATH_MAX];
static long counted, stop_at = -1, seconds_back;
static int fault, log_descriptor = -1;

/* Count below `folder`; at call `number` (from 0) kill the process, or fail with `error` from there on. */
void names_arm(const char *folder, long number, int error, int log) {
    snprintf(root, sizeof root, "%s", folder);
    counted = 0, stop_at = number, fault = error, log_descriptor = log;
}

void names_set_clock_back(long seconds) { seconds_back = seconds; }

static int is_below(int folder, const char *path) {
    char place[PATH_MAX], link[64];
    if (!*root) return 0;
    if (*path == '/') return strncmp(path, root, strlen(root)) == 0;
    if (folder == AT_FDCWD) {
        if (!getcwd(place, sizeof place)) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, place, sizeof place - 1);
        if (size < 0) return 0;
        place[size] = 0;
    }
    return strncmp(place, root, strlen(root)) == 0;
}

static int fails(const char *name, int folder, const char *path) {
    if (!is_below(folder, path)) return 0;
    if (log_descriptor >= 0) dprintf(log_descriptor, "%s\n", name);
    if (stop_at < 0 || counted++ < stop_at) return 0;
    if (!fault) kill(getpid(), SIGKILL);
    errno = fault;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define STAND(name, folder, path, parameters, arguments) \
    int name parameters { return fails(#name, folder, path) ? -1 : REAL(name) arguments; }

STAND(rename, AT_FDCWD, to, (const char *from, const char *to), (from, to))
STAND(renameat, b, to, (int a, const char *from, int b, const char *to), (a, from, b, to))
STAND(renameat2, b, to, (int a, const char *from, int b, const char *to, unsigned flags), (a, from, b, to, flags))
STAND(link, AT_FDCWD, to, (const char *from, const char *to), (from, to))
STAND(linkat, b, to, (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags))
STAND(symlink, AT_FDCWD, to, (const char *from, const char *to), (from, to))
STAND(symlinkat, b, to, (const char *from, int b, const char *to), (from, b, to))
STAND(unlink, AT_FDCWD, path, (const char *path), (path))
STAND(unlinkat, a, path, (int a, const char *path, int flags), (a, path, flags))
STAND(remove, AT_FDCWD, path, (const char *path), (path))
STAND(rmdir, AT_FDCWD, path, (const char *path), (path))
STAND(mkdir, AT_FDCWD, path, (const char *path, mode_t mode), (path, mode))
STAND(mkdirat, a, path, (int a, const char *path, mode_t mode), (a, path, mode))

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = REAL(clock_gettime)(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec -= seconds_back;
    return result;
}
