//! The exchange of requests and answers on one socket.
//!
//! The kernel serves a single dump per socket, and concurrent exchanges on one socket have caused failures in
//! other programs. So a socket has one exchange at a time. Everything sent and received may hold keys and is
//! erased.

use std::{io, ops::ControlFlow, time::Duration};

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR};
use netlink_sys::{AsyncSocket, AsyncSocketExt, TokioSocket};
use rustix::io::Errno;
use zeroize::Zeroizing;

use super::{
    error::{REQUEST_TIMEOUT_MS, RequestError},
    reader::{Meaning, Message},
    socket::{self, Datagram},
    writer::Writer,
};

/// How often an interrupted dump (the table changed while it was read) is read again.
const DUMP_ATTEMPTS_MAX: u32 = 8;
/// Datagrams of an abandoned answer that are read to find its end.
const DRAIN_DATAGRAMS_MAX: usize = 4_096;

/// The outcome of one request of many: the requested object, if any.
pub(crate) type Outcome<T> = Result<Option<T>, RequestError>;

/// A socket for requests.
pub(crate) struct Exchange {
    socket: TokioSocket,
    buffer: Vec<u8>,
    sequence: u32,
    /// The port that requests state as their sender's; 0: none.
    stated_port: u32,
    /// Requests whose answers are not read to their end.
    pending: Option<Pending>,
}

/// Requests that were sent together.
#[derive(Clone, Copy)]
struct Pending {
    /// The sequence number of the first.
    first: u32,
    /// The place among them of the last one that is answered. The kernel carries them out in order.
    last: usize,
}

impl Pending {
    /// The place of the request that a message answers.
    fn place_of(self, message: &Message<'_>) -> Option<usize> {
        let place = usize::try_from(message.sequence.wrapping_sub(self.first)).ok()?;
        (place <= self.last).then_some(place)
    }
}

impl Exchange {
    /// Opens a socket in the calling thread's network namespace, with a receive buffer of this many bytes.
    pub(crate) fn open(protocol: isize, receive_buffer: usize) -> io::Result<Self> {
        let socket = socket::open(protocol, 0, 0, receive_buffer)?;
        socket.socket_ref().set_ext_ack(true)?;
        // An acknowledgement then does not carry the request, with its keys, back.
        socket.socket_ref().set_cap_ack(true)?;
        let (sequence, stated_port, pending) = (0, 0, None);
        Ok(Self { socket, buffer: socket::buffer(), sequence, stated_port, pending })
    }

    /// Sets the receive buffer to this many bytes, even above the sysctl limit if permitted.
    pub(crate) fn enlarge(&self, receive_buffer: usize) {
        socket::enlarge(&self.socket, receive_buffer);
    }

    /// The port number that the kernel's notices of our changes carry.
    pub(crate) fn port(&self) -> io::Result<u32> {
        socket::port_of(&self.socket)
    }

    /// States the port number in requests, for families that repeat in notices what the request states.
    pub(crate) const fn state_port(&mut self, port: u32) {
        self.stated_port = port;
    }

    /// Sends one request and reads the objects in its answer.
    pub(crate) async fn request<T>(
        &mut self,
        mut request: Writer,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>, RequestError> {
        self.listing(&mut request, &read).await.map(|(found, _)| found)
    }

    /// Reads a whole table, and reads it again if it changed meanwhile.
    pub(crate) async fn dump<T, I: IntoIterator<Item = T>>(
        &mut self,
        mut request: Writer,
        read: impl Fn(&Message<'_>) -> I,
    ) -> Result<Vec<T>, RequestError> {
        let mut last = Vec::new();
        for _ in 0..DUMP_ATTEMPTS_MAX {
            let (found, whole) = self.listing(&mut request, &read).await?;
            last = found;
            if whole {
                break;
            }
        }
        Ok(last)
    }

    /// Sends many requests in one call; their answers must fit into the receive buffer. A refusal does not stop those
    /// after it. The outcomes are in the order of the requests. A failure of the exchange counts for every request
    /// without a known outcome.
    ///
    /// Only the last has to be acknowledged: the kernel sends requested objects and refusals in any case.
    pub(crate) async fn requests<T>(
        &mut self,
        requests: &mut [Writer],
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Vec<Outcome<T>> {
        let mut outcomes: Vec<Option<Outcome<T>>> = Vec::new();
        outcomes.resize_with(requests.len(), || None);
        if let Some(last) = requests.last_mut() {
            last.add_flags(NLM_F_ACK);
        }
        let take = |place: usize, message: &Message<'_>, meaning: Meaning| {
            let outcome = match meaning {
                Meaning::Object => Ok(read(message)),
                Meaning::End(Err(error)) => Err(error),
                _ => return ControlFlow::Continue(()),
            };
            if let Some(place) = outcomes.get_mut(place) {
                *place = Some(outcome);
            }
            ControlFlow::Continue(())
        };
        let result = self.run(requests, take).await;
        let unknown = || match &result {
            // All that were not refused were done.
            Ok(()) => Ok(None),
            Err(RequestError::Socket(error)) => Err(RequestError::Socket(copy_of(error))),
            Err(_) => Err(RequestError::TimedOut),
        };
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(unknown)).collect()
    }

    /// Sends requests that the kernel carries out together or not at all; the first refusal is the answer. Those
    /// after it stay unread.
    pub(crate) async fn transaction(
        &mut self,
        requests: &mut [Writer],
    ) -> Result<(), RequestError> {
        let take = |_: usize, _: &Message<'_>, meaning: Meaning| match meaning {
            Meaning::End(Err(error)) => ControlFlow::Break(error),
            _ => ControlFlow::Continue(()),
        };
        self.run(requests, take).await
    }

    /// Begins a listing that [`Self::piece`] reads, for a task that serves others meanwhile. It has no time limit.
    pub(crate) async fn begin(&mut self, mut request: Writer) -> Result<(), RequestError> {
        self.drain();
        self.send(std::slice::from_mut(&mut request)).await
    }

    /// Waits for the next piece of a listing; true if it was the last one. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The listing is abandoned.
    pub(crate) async fn piece(
        &mut self,
        mut take: impl FnMut(&Message<'_>),
    ) -> Result<bool, RequestError> {
        let take = |_: usize, message: &Message<'_>, meaning: Meaning| {
            match meaning {
                Meaning::Object => take(message),
                Meaning::End(Err(error)) => return ControlFlow::Break(error),
                _ => {}
            }
            ControlFlow::Continue(())
        };
        let result = self.datagram(take).await;
        if result.is_err() {
            self.pending = None;
        }
        result
    }

    /// One request and its objects; the flag is false if they changed while they were read.
    async fn listing<T, I: IntoIterator<Item = T>>(
        &mut self,
        request: &mut Writer,
        read: impl Fn(&Message<'_>) -> I,
    ) -> Result<(Vec<T>, bool), RequestError> {
        let (mut found, mut whole) = (Vec::new(), true);
        let take = |_: usize, message: &Message<'_>, meaning: Meaning| {
            whole &= message.flags & NLM_F_DUMP_INTR == 0;
            match meaning {
                Meaning::Object => found.extend(read(message)),
                Meaning::End(Err(error)) => return ControlFlow::Break(error),
                _ => {}
            }
            ControlFlow::Continue(())
        };
        self.run(std::slice::from_mut(request), take).await?;
        Ok((found, whole))
    }

    /// One exchange: sends requests, and hands each message of the answers on with the place of its request, until
    /// the last answer has ended or `take` breaks off.
    async fn run(
        &mut self,
        requests: &mut [Writer],
        mut take: impl FnMut(usize, &Message<'_>, Meaning) -> ControlFlow<RequestError>,
    ) -> Result<(), RequestError> {
        let work = async {
            self.drain();
            self.send(requests).await?;
            late_answer().await;
            while !self.datagram(&mut take).await? {}
            Ok(())
        };
        let limit = Duration::from_millis(REQUEST_TIMEOUT_MS);
        tokio::time::timeout(limit, work).await.unwrap_or(Err(RequestError::TimedOut))
    }

    async fn send(&mut self, requests: &mut [Writer]) -> Result<(), RequestError> {
        let count = u32::try_from(requests.len()).unwrap_or(u32::MAX);
        // Number 0 is that of notices.
        if self.sequence.checked_add(count.max(1)).is_none() {
            self.sequence = 0;
        }
        let first = self.sequence + 1;
        self.sequence += count;
        let length = requests.iter().map(|request| request.len().next_multiple_of(4)).sum();
        let mut bytes = Zeroizing::new(Vec::with_capacity(length));
        for (sequence, request) in (first..).zip(requests.iter_mut()) {
            bytes.extend_from_slice(request.finish(sequence, self.stated_port));
            let padded = bytes.len().next_multiple_of(4);
            bytes.resize(padded, 0);
        }
        debug_assert_eq!(bytes.len(), length);
        self.pending = None;
        self.socket.send(&bytes).await.map_err(RequestError::Socket)?;
        let has = |request: &Writer, flags| request.flags() & flags == flags;
        let is_answered = |it: &Writer| has(it, NLM_F_ACK) || has(it, NLM_F_DUMP);
        self.pending = requests.iter().rposition(is_answered).map(|last| Pending { first, last });
        Ok(())
    }

    /// Receives a datagram and hands its messages on; true if the last answer has ended.
    async fn datagram(
        &mut self,
        mut take: impl FnMut(usize, &Message<'_>, Meaning) -> ControlFlow<RequestError>,
    ) -> Result<bool, RequestError> {
        let Some(pending) = self.pending else { return Ok(true) };
        let datagram = match socket::receive(&self.socket, &mut self.buffer).await {
            Ok(datagram) => datagram,
            Err(error) => {
                // After an error of the socket nothing more is known to come.
                self.pending = None;
                return Err(RequestError::Socket(error));
            }
        };
        for message in datagram.messages() {
            let Some(place) = pending.place_of(&message) else { continue };
            let meaning = message.meaning();
            let ended = place == pending.last && matches!(meaning, Meaning::End(_));
            if ended {
                self.pending = None;
            }
            if let ControlFlow::Break(error) = take(place, &message, meaning) {
                return Err(error);
            }
            if ended {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Discards the rest of an answer that was not read to its end: its future was dropped, it timed out, was refused
    /// half-way, or overran the receive buffer. A dump that still runs on the socket would make the next one fail.
    ///
    /// The kernel answers within the call that sends a request, and goes on with a dump within each call that reads
    /// from it. So everything that will come is there.
    fn drain(&mut self) {
        self.pending = None;
        for _ in 0..DRAIN_DATAGRAMS_MAX {
            match socket::read_now(&self.socket, &mut self.buffer) {
                Ok(()) => drop(Datagram::of(&mut self.buffer)),
                Err(error) if Errno::from_io_error(&error) == Some(Errno::NOBUFS) => {}
                Err(_) => break,
            }
        }
    }
}

fn copy_of(error: &io::Error) -> io::Error {
    let number = error.raw_os_error();
    number.map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}

/// Waits before an answer is read, in builds where a test can ask for that: another program may hold the kernel's
/// configuration lock for seconds.
async fn late_answer() {
    if let Some(ms) = weft_io::faults::asked("netlink-answer-ms").and_then(|ms| ms.parse().ok()) {
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use netlink_sys::protocols::NETLINK_ROUTE;

    use super::super::{socket::RECEIVE_BUFFER_BYTES, writer::Answer};
    use super::*;

    /// RTM_GETLINK (rtnetlink(7)).
    const GET_LINK: u16 = 18;

    /// Asks for all devices, or for the one of an index.
    fn get_link(answer: Answer, index: u32) -> Writer {
        let mut request = Writer::request(GET_LINK, answer);
        // struct ifinfomsg: family, type, index, flags, change.
        request.raw(&[0; 4]);
        request.raw(&index.to_ne_bytes());
        request.raw(&[0; 8]);
        request
    }

    /// The index of a device in an answer.
    fn index_of(message: &Message<'_>) -> Option<u32> {
        message.body.get(4..8)?.try_into().ok().map(u32::from_ne_bytes)
    }

    fn open() -> Exchange {
        Exchange::open(NETLINK_ROUTE, RECEIVE_BUFFER_BYTES).unwrap()
    }

    #[tokio::test]
    async fn an_abandoned_listing_does_not_disturb_the_next() {
        let mut exchange = open();
        for _ in 0..3 {
            exchange.begin(get_link(Answer::Dump, 0)).await.unwrap();
        }
        let mut found = Vec::new();
        while !exchange.piece(|message| found.extend(index_of(message))).await.unwrap() {}
        assert!(found.contains(&1), "{found:?}");
        exchange.begin(get_link(Answer::Dump, 0)).await.unwrap();
        let again = exchange.dump(get_link(Answer::Dump, 0), index_of).await.unwrap();
        assert_eq!(again, found);
    }

    #[tokio::test]
    async fn a_refused_transaction_leaves_nothing_to_wait_for() {
        const NONE: u32 = 0x7fff_fff0;
        let mut exchange = open();
        let begun = std::time::Instant::now();
        for _ in 0..3 {
            let mut requests =
                [get_link(Answer::Acknowledgement, NONE), get_link(Answer::Nothing, NONE)];
            let refused = exchange.transaction(&mut requests).await.unwrap_err();
            assert!(refused.is(Errno::NODEV), "{refused:?}");
            let found = exchange.request(get_link(Answer::Acknowledgement, 1), index_of).await;
            assert_eq!(found.unwrap(), [1]);
        }
        assert!(begun.elapsed() < Duration::from_millis(REQUEST_TIMEOUT_MS));
    }
}
