/* What the mock engine and the load client share: time, growing buffers, HTTP heads, one epoll wait.
 *
 * Both are single threads around epoll on Linux. Sockets are never blocked on; TCP_NODELAY is always on, since a token
 * held back by the kernel would be booked on the gateway.
 */
#ifndef HEADRACE_BENCH_WIRE_H
#define HEADRACE_BENCH_WIRE_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* A content chunk reads "content":"t=000000123456789 ...": microseconds of CLOCK_MONOTONIC at which it was written. */
#define STAMP "t=0"
#define STAMP_DIGITS 15

static inline uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

static inline void die(const char *what) {
    perror(what);
    exit(1);
}

static inline void *must(void *memory) {
    if (!memory) die("out of memory");
    return memory;
}

typedef struct {
    char *data;
    size_t used, size;
} buffer;

static inline void buffer_reserve(buffer *b, size_t more) {
    if (b->used + more <= b->size) return;
    b->size = (b->used + more) * 2;
    b->data = must(realloc(b->data, b->size));
}

static inline void buffer_add(buffer *b, const char *data, size_t length) {
    buffer_reserve(b, length);
    memcpy(b->data + b->used, data, length);
    b->used += length;
}

static inline void buffer_drop(buffer *b, size_t length) {
    memmove(b->data, b->data + length, b->used - length);
    b->used -= length;
}

static inline void buffer_free(buffer *b) {
    free(b->data);
    *b = (buffer){0};
}

/* The value of a header (name in lower case with its colon), or NULL. `head` ends with the empty line. */
static inline const char *header(const char *head, size_t length, const char *name) {
    size_t n = strlen(name);
    const char *end = head + length, *line = head;
    while ((line = memchr(line, '\n', (size_t)(end - line))) && ++line + n < end)
        if (!strncasecmp(line, name, n)) {
            for (line += n; line < end && *line == ' '; line++) {}
            return line;
        }
    return NULL;
}

static inline int loopback_socket(void) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    if (fd < 0) die("socket");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

static inline struct sockaddr_in loopback(int port) {
    return (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static inline void watch(int poller, int operation, int fd, uint32_t events, void *owner) {
    struct epoll_event event = {.events = events, .data.ptr = owner};
    if (epoll_ctl(poller, operation, fd, &event) < 0) die("epoll_ctl");
}

/* Waits until something happens or the monotonic time `until_us` has come; 0 is for ever. */
static inline int wait_until(int poller, struct epoll_event *events, int room, uint64_t until_us) {
    struct timespec left, *limit = NULL;
    if (until_us) {
        uint64_t now = now_us(), us = until_us > now ? until_us - now : 0;
        left = (struct timespec){.tv_sec = (time_t)(us / 1000000u), .tv_nsec = (long)(us % 1000000u) * 1000};
        limit = &left;
    }
    int n = epoll_pwait2(poller, events, room, limit, NULL);
    if (n < 0 && errno != EINTR) die("epoll_pwait2");
    return n < 0 ? 0 : n;
}

#endif
