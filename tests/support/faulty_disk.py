"""A file system that refuses: every call of a process that writes below a folder fails with one error, while asked to.

A small library in front of libc (``LD_PRELOAD``), so that SQLite, torch and safetensors meet the error too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FOLDER, CONTROL = "FAULTY_FOLDER", "FAULTY_CONTROL"
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* The error that the control file asks for; 0: none. Raw calls, so that nothing is interposed. */
static int wanted(void) {
    static const char *control;
    char text[16] = {0};
    int saved = errno, fd;
    if (!control) control = getenv("FAULTY_CONTROL");
    if (!control || (fd = syscall(257, AT_FDCWD, control, O_RDONLY | O_CLOEXEC)) < 0) { errno = saved; return 0; }
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    errno = saved;
    return n > 0 ? atoi(text) : 0;
}
static int below(const char *path) {
    const char *folder = getenv("FAULTY_FOLDER");
    return folder && path && !strncmp(path, folder, strlen(folder));
}
static int refused(const char *path) {
    int number = wanted();
    if (number && below(path)) { errno = number; return 1; }
    return 0;
}
static int fd_refused(int fd) {
    int number = wanted(), saved = errno;
    char link[64], path[PATH_MAX];
    if (!number) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (n <= 0) return 0;
    path[n] = 0;
    if (below(path)) { errno = number; return 1; }
    return 0;
}
#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)
#define OPEN(name) int name(const char *path, int flags, ...) { \
    REAL(int, #name, const char *, int, ...); \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); \
    va_end(list); return (flags & (O_WRONLY | O_RDWR | O_CREAT)) && refused(path) ? -1 : real(path, flags, mode); }
OPEN(open) OPEN(open64)
#define OPENAT(name) int name(int at, const char *path, int flags, ...) { \
    REAL(int, #name, int, const char *, int, ...); va_list list; va_start(list, flags); \
    mode_t mode = va_arg(list, mode_t); va_end(list); \
    if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && refused(path)) return -1; return real(at, path, flags, mode); }
OPENAT(openat) OPENAT(openat64)
FILE *fopen64(const char *path, const char *mode) {
    REAL(FILE *, "fopen64", const char *, const char *);
    if (strpbrk(mode, "wa+") && refused(path)) return NULL; return real(path, mode); }
FILE *fopen(const char *path, const char *mode) {
    REAL(FILE *, "fopen", const char *, const char *);
    if (strpbrk(mode, "wa+") && refused(path)) return NULL; return real(path, mode); }
ssize_t write(int fd, const void *data, size_t n) {
    REAL(ssize_t, "write", int, const void *, size_t); return fd_refused(fd) ? -1 : real(fd, data, n); }
ssize_t writev(int fd, const struct iovec *v, int n) {
    REAL(ssize_t, "writev", int, const struct iovec *, int); return fd_refused(fd) ? -1 : real(fd, v, n); }
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t); return fd_refused(fd) ? -1 : real(fd, data, n, at); }
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t); return fd_refused(fd) ? -1 : real(fd, data, n, at); }
int fsync(int fd) { REAL(int, "fsync", int); return fd_refused(fd) ? -1 : real(fd); }
int fdatasync(int fd) { REAL(int, "fdatasync", int); return fd_refused(fd) ? -1 : real(fd); }
int ftruncate(int fd, off_t n) { REAL(int, "ftruncate", int, off_t); return fd_refused(fd) ? -1 : real(fd, n); }
int ftruncate64(int fd, off64_t n) {
    REAL(int, "ftruncate64", int, off64_t);
    return fd_refused(fd) ? -1 : real(fd, n); }
int truncate(const char *p, off_t n) {
    REAL(int, "truncate", const char *, off_t); return refused(p) ? -1 : real(p, n); }
int mkdir(const char *p, mode_t m) {
    REAL(int, "mkdir", const char *, mode_t);
    return refused(p) ? -1 : real(p, m); }
int rmdir(const char *p) { REAL(int, "rmdir", const char *); return refused(p) ? -1 : real(p); }
int unlink(const char *p) { REAL(int, "unlink", const char *); return refused(p) ? -1 : real(p); }
int rename(const char *a, const char *b) {
    REAL(int, "rename", const char *, const char *); return refused(b) ? -1 : real(a, b); }
int link(const char *a, const char *b) {
    REAL(int, "link", const char *, const char *); return refused(b) ? -1 : real(a, b); }
int symlink(const char *a, const char *b) {
    REAL(int, "symlink", const char *, const char *); return refused(b) ? -1 : real(a, b); }
"""


@contextmanager
def faulty_disk(tmp_path: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Environment of child processes in which all that they write below ``folder`` may fail. Yields a file: while it
    holds the number of an error, it does. Skips the test without a C compiler, or elsewhere than on Linux, x86-64."""
    compiler = shutil.which("cc")
    if compiler is None or os.uname().machine != "x86_64" or os.uname().sysname != "Linux":
        pytest.skip("expected a C compiler on Linux, x86-64")
    source, library, control = tmp_path / "faulty.c", tmp_path / "faulty.so", tmp_path / "errno"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-w", "-o", library, source, "-ldl"], check=True)
    with patch.context() as inside:
        inside.setenv("LD_PRELOAD", str(library))
        inside.setenv(FOLDER, str(folder))
        inside.setenv(CONTROL, str(control))
        yield control
