//! One NETLINK_ROUTE socket with one request in flight.
//!
//! The kernel serves a single dump per socket, and concurrent exchanges on one socket have caused failures in
//! other programs. So a lock guards the socket for a whole exchange. Unreadable messages and attributes are
//! skipped, never errors of the whole answer.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_ACK_TLVS, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_MULTIPART, NLM_F_REQUEST,
    NetlinkHeader, NetlinkMessage, NetlinkPayload, NlasIterator,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{AsyncSocket, AsyncSocketExt, TokioSocket, protocols::NETLINK_ROUTE};
use tokio::sync::Mutex;

use super::{
    error::{REQUEST_TIMEOUT_MS, RequestError},
    late,
};

/// How often an interrupted dump (the table changed while it was read) is read again.
pub(crate) const DUMP_ATTEMPTS_MAX: u32 = 8;
/// Most requests in one message to the kernel. Their acknowledgements (under 1 KiB each as the
/// kernel counts them) must fit the receive buffer that an unprivileged limit leaves.
const BATCH_REQUESTS_MAX: usize = 100;
/// Receive buffer of a request socket, in bytes: one batch of a large dump and then some.
const RECEIVE_BUFFER_BYTES: usize = 1 << 20;
/// Length of `struct nlmsghdr`, which every message and every error's echo begins with.
pub(crate) const HEADER_LEN: usize = 16;
/// Attribute of an extended acknowledgement that holds the kernel's explanation.
const NLMSGERR_ATTR_MSG: u16 = 1;

/// A socket in the network namespace of the thread that opened it.
pub(crate) struct Socket {
    exchange: Mutex<Exchange>,
    changes: Arc<AtomicU64>,
}

struct Exchange {
    socket: TokioSocket,
    sequence: u32,
    /// The last exchange was abandoned (its future was dropped, or it timed out): the kernel may
    /// still be answering it.
    unfinished: bool,
}

/// The meaning of a received message for the exchange with a given sequence number.
enum Step {
    Data(RouteNetlinkMessage),
    Interrupted(Option<RouteNetlinkMessage>),
    Finished,
    Failed(RequestError),
    Skip,
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace. Requests that change something are
    /// counted in `changes`.
    pub(crate) fn open(changes: Arc<AtomicU64>) -> io::Result<Self> {
        let socket = TokioSocket::new(NETLINK_ROUTE)?;
        socket.socket_ref().set_rx_buf_sz(RECEIVE_BUFFER_BYTES as i32)?;
        socket.socket_ref().set_ext_ack(true)?;
        socket.socket_ref().set_cap_ack(true)?;
        let exchange = Exchange { socket, sequence: 0, unfinished: false };
        Ok(Self { exchange: Mutex::new(exchange), changes })
    }

    /// Reads a whole table.
    pub(crate) async fn dump(
        &self,
        message: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, RequestError> {
        let mut exchange = self.exchange.lock().await;
        let mut last = Vec::new();
        for _ in 0..DUMP_ATTEMPTS_MAX {
            let (found, whole) = exchange.run(message.clone(), NLM_F_REQUEST | NLM_F_DUMP).await?;
            last = found;
            if whole {
                break;
            }
        }
        Ok(last)
    }

    /// Reads one object.
    pub(crate) async fn get(
        &self,
        message: RouteNetlinkMessage,
    ) -> Result<Option<RouteNetlinkMessage>, RequestError> {
        let mut exchange = self.exchange.lock().await;
        let (found, _) = exchange.run(message, NLM_F_REQUEST | NLM_F_ACK).await?;
        Ok(found.into_iter().next())
    }

    /// Changes the kernel's state; `flags` are those besides REQUEST and ACK.
    pub(crate) async fn change(
        &self,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(), RequestError> {
        let mut exchange = self.exchange.lock().await;
        self.changes.fetch_add(1, Ordering::Relaxed);
        exchange.run(message, NLM_F_REQUEST | NLM_F_ACK | flags).await.map(|_| ())
    }

    /// Makes many changes with few system calls, in order; `flags` as in [`Self::change`]. A refused change
    /// does not stop those after it. The answers are in the order of the requests.
    ///
    /// # Errors
    /// Only failures of the whole exchange: the socket failed, or no answer came in time.
    pub(crate) async fn change_all(
        &self,
        requests: Vec<(RouteNetlinkMessage, u16)>,
    ) -> Result<Vec<Result<(), RequestError>>, RequestError> {
        let mut exchange = self.exchange.lock().await;
        let mut answers = Vec::with_capacity(requests.len());
        let mut requests = requests.into_iter().peekable();
        while requests.peek().is_some() {
            let batch: Vec<_> = requests.by_ref().take(BATCH_REQUESTS_MAX).collect();
            self.changes.fetch_add(batch.len() as u64, Ordering::Relaxed);
            let limit = Duration::from_millis(REQUEST_TIMEOUT_MS);
            match tokio::time::timeout(limit, exchange.run_batch(batch)).await {
                Ok(found) => answers.extend(found?),
                Err(_) => return Err(RequestError::TimedOut),
            }
        }
        Ok(answers)
    }
}

impl Exchange {
    /// One request and its whole answer; the flag is false when a dump was interrupted.
    async fn run(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(Vec<RouteNetlinkMessage>, bool), RequestError> {
        let limit = Duration::from_millis(REQUEST_TIMEOUT_MS);
        match tokio::time::timeout(limit, self.run_unbounded(message, flags)).await {
            Ok(result) => result,
            Err(_) => Err(RequestError::TimedOut),
        }
    }

    async fn run_unbounded(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(Vec<RouteNetlinkMessage>, bool), RequestError> {
        self.finish_abandoned().await;
        self.sequence = next(self.sequence);
        let mut bytes = Vec::new();
        append(&mut bytes, message, flags, self.sequence);
        self.socket.send(&bytes).await.map_err(RequestError::Socket)?;
        self.unfinished = true;
        late::answer().await;
        let result = self.collect(self.sequence).await;
        self.unfinished = false;
        result
    }

    /// One message with many requests, and all their acknowledgements.
    async fn run_batch(
        &mut self,
        requests: Vec<(RouteNetlinkMessage, u16)>,
    ) -> Result<Vec<Result<(), RequestError>>, RequestError> {
        self.finish_abandoned().await;
        let mut bytes = Vec::new();
        let mut sequences = Vec::with_capacity(requests.len());
        for (message, flags) in requests {
            self.sequence = next(self.sequence);
            append(&mut bytes, message, NLM_F_REQUEST | NLM_F_ACK | flags, self.sequence);
            sequences.push(self.sequence);
        }
        self.socket.send(&bytes).await.map_err(RequestError::Socket)?;
        self.unfinished = true;
        late::answer().await;
        let mut answers = Vec::with_capacity(sequences.len());
        // The kernel works them off, and answers, in their order; one datagram may hold several.
        let mut waiting = sequences.into_iter().peekable();
        while waiting.peek().is_some() {
            let (datagram, _) = self.socket.recv_from_full().await.map_err(RequestError::Socket)?;
            for bytes in messages(&datagram) {
                let Some(sequence) = waiting.peek().copied() else { break };
                match step(bytes, sequence) {
                    Step::Finished => answers.push(Ok(())),
                    Step::Failed(error) => answers.push(Err(error)),
                    Step::Data(_) | Step::Interrupted(_) | Step::Skip => continue,
                }
                waiting.next();
            }
        }
        self.unfinished = false;
        Ok(answers)
    }

    /// Reads an abandoned answer to its end, else a dump still running on the socket would make the
    /// next one fail.
    async fn finish_abandoned(&mut self) {
        if self.unfinished {
            let _ = self.collect(self.sequence).await;
            self.unfinished = false;
        }
    }

    /// Collects every answer to one sequence number.
    async fn collect(
        &mut self,
        sequence: u32,
    ) -> Result<(Vec<RouteNetlinkMessage>, bool), RequestError> {
        let mut found = Vec::new();
        let mut whole = true;
        loop {
            let (datagram, _) = self.socket.recv_from_full().await.map_err(RequestError::Socket)?;
            for bytes in messages(&datagram) {
                match step(bytes, sequence) {
                    Step::Data(message) => found.push(message),
                    Step::Interrupted(message) => {
                        whole = false;
                        found.extend(message);
                    }
                    Step::Finished => return Ok((found, whole)),
                    Step::Failed(error) => return Err(error),
                    Step::Skip => {}
                }
            }
        }
    }
}

fn next(sequence: u32) -> u32 {
    sequence.wrapping_add(1).max(1)
}

/// Appends one request, padded so that another may follow.
fn append(bytes: &mut Vec<u8>, message: RouteNetlinkMessage, flags: u16, sequence: u32) {
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    header.sequence_number = sequence;
    let mut request = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
    request.finalize();
    let start = bytes.len();
    bytes.resize(start + request.buffer_len().next_multiple_of(4), 0);
    request.serialize(&mut bytes[start..]);
}

/// Cuts a datagram into its messages; a truncated or senseless rest is left out.
pub(crate) fn messages(mut datagram: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(datagram.get(..4)?.try_into().ok()?) as usize;
        if length < HEADER_LEN {
            return None;
        }
        let message = datagram.get(..length)?;
        let next = length.next_multiple_of(4).min(datagram.len());
        datagram = datagram.get(next..)?;
        Some(message)
    })
}

fn step(bytes: &[u8], sequence: u32) -> Step {
    let decoded = NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes);
    let Ok(message) = decoded else {
        // A newer kernel may send an object that this version cannot read: only that object is unknown then.
        tracing::debug!(error = ?decoded.err(), "skipped a netlink message that cannot be read");
        return Step::Skip;
    };
    let (header, payload) = message.into_parts();
    if header.sequence_number != sequence {
        return Step::Skip;
    }
    let interrupted = header.flags & NLM_F_MULTIPART != 0 && header.flags & NLM_F_DUMP_INTR != 0;
    match payload {
        NetlinkPayload::InnerMessage(message) if interrupted => Step::Interrupted(Some(message)),
        NetlinkPayload::InnerMessage(message) => Step::Data(message),
        NetlinkPayload::Done(done) if done.code < 0 => {
            Step::Failed(RequestError::Kernel { errno: -done.code, reason: None })
        }
        NetlinkPayload::Done(_) => Step::Finished,
        NetlinkPayload::Error(error) => match error.code {
            None => Step::Finished,
            Some(code) => Step::Failed(RequestError::Kernel {
                errno: code.get().saturating_neg(),
                reason: explanation(header.flags, &error.header),
            }),
        },
        NetlinkPayload::Overrun(_) => {
            Step::Failed(RequestError::Socket(io::Error::from(io::ErrorKind::OutOfMemory)))
        }
        _ => Step::Skip,
    }
}

/// The kernel's own words in an extended acknowledgement, after the echo of the request's header.
pub(crate) fn explanation(flags: u16, echo: &[u8]) -> Option<String> {
    if flags & NLM_F_ACK_TLVS == 0 {
        return None;
    }
    let attributes = echo.get(HEADER_LEN..)?;
    let text = NlasIterator::new(attributes)
        .filter_map(Result::ok)
        .find(|attribute| attribute.kind() == NLMSGERR_ATTR_MSG)
        .map(|attribute| attribute.value().to_vec())?;
    let text = String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
    use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage};

    use super::*;

    /// Devices enough for a dump of several batches.
    const DEVICES: usize = 100;

    fn list() -> RouteNetlinkMessage {
        RouteNetlinkMessage::GetLink(LinkMessage::default())
    }

    /// Runs a test body in a separate network namespace.
    fn apart<F: Future<Output = ()>>(body: impl FnOnce() -> F + Send + 'static) {
        let outcome = std::thread::spawn(|| {
            weft_io::namespace::unshare_network()
                .expect("this test makes network namespaces and must run as root");
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(body());
        });
        if let Err(panic) = outcome.join() {
            std::panic::resume_unwind(panic);
        }
    }

    async fn with_devices() -> Socket {
        let socket = Socket::open(Arc::default()).unwrap();
        for n in 0..DEVICES {
            let mut message = LinkMessage::default();
            message.attributes.push(LinkAttribute::IfName(format!("many{n}")));
            let kind = LinkInfo::Kind(InfoKind::Bridge);
            message.attributes.push(LinkAttribute::LinkInfo(vec![kind]));
            socket.create_link(message, "many").await.unwrap();
        }
        socket
    }

    #[test]
    fn an_abandoned_dump_does_not_disturb_the_next() {
        apart(|| async {
            let socket = with_devices().await;
            {
                // A call whose future was dropped after it had sent its request.
                let mut exchange = socket.exchange.lock().await;
                exchange.sequence += 1;
                let mut header = NetlinkHeader::default();
                header.flags = NLM_F_REQUEST | NLM_F_DUMP;
                header.sequence_number = exchange.sequence;
                let mut request = NetlinkMessage::new(header, list().into());
                request.finalize();
                let mut bytes = vec![0; request.buffer_len()];
                request.serialize(&mut bytes);
                exchange.socket.send(&bytes).await.unwrap();
                exchange.unfinished = true;
            }
            assert_eq!(socket.dump(list()).await.unwrap().len(), DEVICES + 1);
        });
    }

    #[test]
    fn of_many_changes_each_has_its_own_answer() {
        apart(|| async {
            let changes = Arc::default();
            let socket = Socket::open(Arc::clone(&changes)).unwrap();
            // Every third asks for a kind of device that there is not.
            let request = |n: usize| {
                let kind = if n.is_multiple_of(3) { "no-such-kind" } else { "bridge" };
                let kind = LinkInfo::Kind(InfoKind::Other(kind.into()));
                let mut message = LinkMessage::default();
                message.attributes.push(LinkAttribute::IfName(format!("many{n}")));
                message.attributes.push(LinkAttribute::LinkInfo(vec![kind]));
                (RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
            };
            let many = 3 * BATCH_REQUESTS_MAX - 1;
            let answers = socket.change_all((0..many).map(request).collect()).await.unwrap();
            assert_eq!(answers.len(), many);
            for (n, answer) in answers.into_iter().enumerate() {
                assert_eq!(answer.is_err(), n.is_multiple_of(3), "{n}");
            }
            assert_eq!(changes.load(Ordering::Relaxed), many as u64);
            let made = (0..many).filter(|n| !n.is_multiple_of(3)).count();
            assert_eq!(socket.dump(list()).await.unwrap().len(), made + 1);
            assert!(socket.change_all(Vec::new()).await.unwrap().is_empty());
        });
    }

    #[test]
    fn the_kernels_own_words_are_kept() {
        apart(|| async {
            let socket = Socket::open(Arc::default()).unwrap();
            let mut message = LinkMessage::default();
            message.attributes.push(LinkAttribute::IfName("odd".into()));
            let kind = LinkInfo::Kind(InfoKind::Other("no-such-kind".into()));
            message.attributes.push(LinkAttribute::LinkInfo(vec![kind]));
            let text = socket.create_link(message, "odd").await.unwrap_err().to_string();
            assert!(text.contains("create device odd"), "{text}");
            assert!(text.contains("Unknown device type"), "{text}");
        });
    }

    #[test]
    fn a_senseless_datagram_ends_the_cutting() {
        let whole = [16, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(messages(&whole).count(), 1);
        let twice = [whole, whole].concat();
        assert_eq!(messages(&twice).count(), 2);
        for length in 0..16 {
            assert_eq!(messages(&twice[..16 + length]).count(), 1, "{length}");
        }
        assert_eq!(messages(&[0; 64]).count(), 0);
        assert_eq!(messages(&[0xff; 64]).count(), 0);
        let mut odd = whole.to_vec();
        odd[0] = 17;
        odd.push(9);
        assert_eq!(messages(&odd).count(), 1);
    }
}
