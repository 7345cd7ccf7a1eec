//! Requests to NETLINK_ROUTE, in the words of `netlink-packet-route`.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use netlink_packet_core::{NetlinkDeserializable, NetlinkHeader, NetlinkSerializable};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::protocols::NETLINK_ROUTE;
use tokio::sync::Mutex;

use super::{
    error::RequestError,
    exchange::Exchange,
    reader::Message,
    socket::RECEIVE_BUFFER_BYTES,
    writer::{Answer, Writer},
};

/// Most requests in one call. Their acknowledgements (under 1 KiB each as the kernel counts them) must fit
/// the receive buffer that an unprivileged limit leaves.
const BATCH_REQUESTS_MAX: usize = 100;

/// A socket in the network namespace of the thread that opened it.
pub(crate) struct Socket {
    exchange: Mutex<Exchange>,
    changes: Arc<AtomicU64>,
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace. Requests that change something are
    /// counted in `changes`.
    pub(crate) fn open(changes: Arc<AtomicU64>) -> io::Result<Self> {
        let exchange = Exchange::open(NETLINK_ROUTE, RECEIVE_BUFFER_BYTES)?;
        Ok(Self { exchange: Mutex::new(exchange), changes })
    }

    /// Reads a whole table.
    pub(crate) async fn dump(
        &self,
        message: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, RequestError> {
        let request = written(&message, Answer::Dump, 0);
        self.exchange.lock().await.dump(request, read_or_skip).await
    }

    /// Reads one object.
    pub(crate) async fn get(
        &self,
        message: RouteNetlinkMessage,
    ) -> Result<Option<RouteNetlinkMessage>, RequestError> {
        let request = written(&message, Answer::Acknowledgement, 0);
        let found = self.exchange.lock().await.request(request, read_or_skip).await?;
        Ok(found.into_iter().next())
    }

    /// Changes the kernel's state; `flags` are those besides REQUEST and ACK.
    pub(crate) async fn change(
        &self,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(), RequestError> {
        let request = written(&message, Answer::Acknowledgement, flags);
        let mut exchange = self.exchange.lock().await;
        self.changes.fetch_add(1, Ordering::Relaxed);
        exchange.request(request, |_| None::<()>).await.map(|_| ())
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
        let mut requests: Vec<Writer> = requests
            .into_iter()
            .map(|(message, flags)| written(&message, Answer::Acknowledgement, flags))
            .collect();
        let mut exchange = self.exchange.lock().await;
        let mut answers = Vec::with_capacity(requests.len());
        for batch in requests.chunks_mut(BATCH_REQUESTS_MAX) {
            self.changes.fetch_add(batch.len() as u64, Ordering::Relaxed);
            for outcome in exchange.requests(batch, |_| None::<()>).await {
                match outcome {
                    Ok(_) => answers.push(Ok(())),
                    Err(refused @ RequestError::Kernel { .. }) => answers.push(Err(refused)),
                    Err(failed) => return Err(failed),
                }
            }
        }
        Ok(answers)
    }
}

fn written(message: &RouteNetlinkMessage, answer: Answer, flags: u16) -> Writer {
    let mut request = Writer::request_with(message.message_type(), answer, flags);
    let mut body = vec![0; message.buffer_len()];
    message.serialize(&mut body);
    request.raw(&body);
    request
}

/// Reads an object.
///
/// # Errors
/// It has a form that this version cannot read.
pub(crate) fn read(message: &Message<'_>) -> Result<RouteNetlinkMessage, impl std::fmt::Debug> {
    let mut header = NetlinkHeader::default();
    header.message_type = message.kind;
    header.flags = message.flags;
    RouteNetlinkMessage::deserialize(&header, message.body)
}

/// A newer kernel may send an object that this version cannot read: only that object is unknown then.
fn read_or_skip(message: &Message<'_>) -> Option<RouteNetlinkMessage> {
    let read = read(message);
    read.inspect_err(|error| {
        tracing::debug!(?error, "skipped a netlink message that cannot be read");
    })
    .ok()
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
            // A call whose future was dropped after it had sent its request.
            socket.exchange.lock().await.begin(written(&list(), Answer::Dump, 0)).await.unwrap();
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
}
