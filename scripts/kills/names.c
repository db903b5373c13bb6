/* Wrap libc's calls that change a name: count those below a folder, and kill the process at one of them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[PATH_MAX];
static long counted, stop_at = -1;
static int file = -1;

/* Count below NAMES_FOLDER in this process, a byte of the file NAMES_COUNT for each; kill it at call NAMES_CALL. */
__attribute__((constructor)) static void arm(void) {
    if (!getenv("NAMES_FOLDER")) return;
    snprintf(root, sizeof root, "%s", getenv("NAMES_FOLDER"));
    stop_at = atol(getenv("NAMES_CALL"));
    file = open(getenv("NAMES_COUNT"), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    unsetenv("NAMES_FOLDER"); /* the processes that this one starts are not counted */
}

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

static void count(int folder, const char *path) {
    if (!is_below(folder, path)) return;
    if (counted++ == stop_at) kill(getpid(), SIGKILL);
    if (write(file, ".", 1) != 1) abort();
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define STAND(name, folder, path, parameters, arguments) \
    int name parameters { count(folder, path); return REAL(name) arguments; }

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
