//! Waiting for devices and sockets, and being woken by another thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

/// Events that one [`Poller::wait`] returns at most; the rest come with the next.
pub const EVENTS_MAX: usize = 16;

/// An epoll set, level-triggered: a source that is not drained is reported again.
pub struct Poller {
    epoll: OwnedFd,
    events: [epoll::Event; EVENTS_MAX],
    /// Processor time of the last wait while it was awake.
    awake: Duration,
}

impl Poller {
    /// An empty set.
    ///
    /// # Errors
    /// The error of `epoll_create1`: out of descriptors or memory.
    pub fn new() -> io::Result<Self> {
        let empty =
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let (epoll, awake) = (epoll::create(epoll::CreateFlags::CLOEXEC)?, Duration::ZERO);
        Ok(Self { epoll, events: [empty; EVENTS_MAX], awake })
    }

    /// Reports `source` as `token` whenever it is readable or broken.
    ///
    /// # Errors
    /// The error of `epoll_ctl`.
    pub fn add(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::add(&self.epoll, source, data, epoll::EventFlags::IN)?)
    }

    /// Reports `source`, which was added as `token`, whenever it takes bytes, too; or no longer.
    ///
    /// # Errors
    /// The error of `epoll_ctl`: it was not added.
    pub fn watch_writable(&self, source: impl AsFd, token: u64, watch: bool) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        let mut flags = epoll::EventFlags::IN;
        flags.set(epoll::EventFlags::OUT, watch);
        Ok(epoll::modify(&self.epoll, source, data, flags)?)
    }

    /// Stops reporting `source`.
    ///
    /// # Errors
    /// The error of `epoll_ctl`: it was not added.
    pub fn remove(&self, source: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, source)?)
    }

    /// Waits until something is ready or `timeout` has passed (`None`: no limit) and returns the tokens. An
    /// empty answer means the time has passed or a signal came.
    ///
    /// # Errors
    /// The error of `epoll_wait`.
    pub fn wait(
        &mut self,
        timeout: Option<Duration>,
    ) -> io::Result<impl Iterator<Item = u64> + '_> {
        let ready = self.ask(timeout)?;
        Ok(self.tokens(ready))
    }

    /// As [`Self::wait`], but awake for the first `spin` of the time: an event in that time need not wake a
    /// thread. Other threads that want the CPU get it all the same.
    ///
    /// # Errors
    /// The error of `epoll_wait`.
    pub fn wait_awake(
        &mut self,
        spin: Duration,
        timeout: Option<Duration>,
    ) -> io::Result<impl Iterator<Item = u64> + '_> {
        self.awake = Duration::ZERO;
        if spin.is_zero() {
            let ready = self.ask(timeout)?;
            return Ok(self.tokens(ready));
        }
        let (begin, used) = (Instant::now(), processor_time());
        let mut ready = self.ask(Some(Duration::ZERO))?;
        while ready == 0 {
            let waited = begin.elapsed();
            if timeout.is_some_and(|timeout| waited >= timeout) {
                break;
            }
            if waited >= spin {
                self.awake = processor_time().saturating_sub(used);
                ready = self.ask(timeout.map(|timeout| timeout.saturating_sub(waited)))?;
                break;
            }
            std::thread::yield_now();
            ready = self.ask(Some(Duration::ZERO))?;
        }
        if self.awake.is_zero() {
            self.awake = processor_time().saturating_sub(used);
        }
        Ok(self.tokens(ready))
    }

    /// The processor time that the last wait took while it was awake.
    pub const fn was_awake(&self) -> Duration {
        self.awake
    }

    fn ask(&mut self, timeout: Option<Duration>) -> io::Result<usize> {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        match epoll::wait(&self.epoll, &mut self.events[..], timeout.as_ref()) {
            Ok(ready) => Ok(ready),
            Err(rustix::io::Errno::INTR) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    fn tokens(&self, ready: usize) -> impl Iterator<Item = u64> + '_ {
        self.events[..ready].iter().map(|event| event.data.u64())
    }
}

/// The processor time that the calling thread has used so far.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or_default())
}

impl std::fmt::Debug for Poller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Poller").field("epoll", &self.epoll).finish_non_exhaustive()
    }
}

/// Wakes a [`Poller`] from any thread.
#[derive(Clone, Debug)]
pub struct Waker {
    event: Arc<OwnedFd>,
}

impl Waker {
    /// A waker; add it to the poller that it is to wake.
    ///
    /// # Errors
    /// The error of `eventfd`: out of descriptors.
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event: Arc::new(event) })
    }

    /// Makes the waker readable until [`Self::clear`].
    pub fn wake(&self) {
        // It fails only when the counter is full, and then the waker is readable anyway.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    /// Takes all wakes so far.
    pub fn clear(&self) {
        // It fails only when there was none.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn awake_or_asleep_the_same_is_seen() {
        let waker = Waker::new().unwrap();
        let mut poller = Poller::new().unwrap();
        poller.add(&waker, 7).unwrap();
        let ms = Duration::from_millis;
        // Found before the spinning ends, and after it.
        for (spin, after) in [(ms(60_000), ms(5)), (ms(1), ms(20))] {
            let other = waker.clone();
            let thread = std::thread::spawn(move || {
                std::thread::sleep(after);
                other.wake();
            });
            assert_eq!(poller.wait_awake(spin, None).unwrap().collect::<Vec<_>>(), [7]);
            thread.join().unwrap();
            waker.clear();
        }
        for spin in [ms(0), ms(1), ms(60_000)] {
            assert_eq!(poller.wait_awake(spin, Some(ms(20))).unwrap().count(), 0);
            // Processor time, of which others may have had the most.
            let awake = poller.was_awake();
            assert_eq!(awake > ms(0), spin > ms(0), "{awake:?} of {spin:?}");
            assert!(awake < ms(19) || spin > ms(20), "{awake:?} of {spin:?}: it slept");
        }
    }

    #[test]
    fn a_wake_from_another_thread_is_seen_until_cleared() {
        let waker = Waker::new().unwrap();
        let mut poller = Poller::new().unwrap();
        poller.add(&waker, 7).unwrap();
        assert_eq!(poller.wait(Some(Duration::ZERO)).unwrap().count(), 0);
        let other = waker.clone();
        std::thread::spawn(move || (other.wake(), other.wake())).join().unwrap();
        for _ in 0..2 {
            assert_eq!(poller.wait(None).unwrap().collect::<Vec<_>>(), [7]);
        }
        waker.clear();
        assert_eq!(poller.wait(Some(Duration::ZERO)).unwrap().count(), 0);
    }
}
