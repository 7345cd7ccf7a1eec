//! TCP connections of clients: from the listener until the device has them, and for their last words.
//!
//! Each connection has a task, which reads no further than the end of a frame: there the device goes on. A connection
//! whose client has not shown yet who it is costs one of [`UNPROVEN_MAX`] places. If none is free, the oldest connection
//! of that origin which has most gives way, so that a flood makes room for others at its own expense.

mod connection;

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinSet};
use weft_openvpn::frame;

use self::connection::Task;
pub(super) use self::connection::{Order, PACKET_BYTES_MAX};

/// Connections whose clients have not shown yet who they are.
const UNPROVEN_MAX: usize = 512;
/// Connections in all.
const CONNECTIONS_MAX: usize = 16_384;
/// Packets of one connection that wait for its session.
const PACKETS_MAX: usize = 16;
/// Packets that wait for a connection to take them.
const ORDERS_MAX: usize = 64;
/// News of all connections that wait for the service. Each connection has at most one more, and waits.
const EVENTS_MAX: usize = 256;
/// The pause after a connection could not be taken, as for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long a gateway that ends waits until its connections have sent their last words.
const FINISH_LIMIT: Duration = Duration::from_secs(1);
/// The part of an IPv6 address that one origin has, in bits.
const ORIGIN_BITS: u32 = 64;

/// Numbers a connection; no two of a gateway have the same.
pub(super) type Number = u64;

/// What listeners and connections tell.
pub(super) enum StreamEvent {
    /// Somebody has connected.
    Opened(tokio::net::TcpStream, SocketAddr),
    /// A packet of the control channel. [`Streams::took`] is called for each.
    Packet { connection: Number, packet: Vec<u8> },
    /// The connection was given away at the end of a frame. What it has not sent comes with it.
    Given { connection: Number, stream: TcpStream, left: mpsc::Receiver<Order> },
    /// It is over, for this reason.
    Closed { connection: Number, reason: &'static str },
}

/// What became of a packet that is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// The connection's task sends it.
    Taken,
    /// The device has the connection.
    AtDevice,
    /// The connection is over, or takes nothing more.
    Gone,
}

/// A connection that is new.
pub(super) struct Opened {
    /// A client that has not shown who it is, and whose connection had to give way.
    pub(super) evicted: Option<u32>,
    /// Whether a connection gave way.
    pub(super) has_evicted: bool,
}

/// All listeners and connections. They end with this value.
pub(super) struct Streams {
    listens: Vec<SocketAddr>,
    sender: mpsc::Sender<StreamEvent>,
    events: mpsc::Receiver<StreamEvent>,
    connections: BTreeMap<Number, Connection>,
    unproven: Unproven,
    next: Number,
    listeners: JoinSet<Infallible>,
    tasks: JoinSet<()>,
}

struct Connection {
    source: SocketAddr,
    client: Option<u32>,
    holder: Holder,
}

enum Holder {
    Task { orders: mpsc::Sender<Order>, permits: Arc<Semaphore>, task: AbortHandle },
    Device(Arc<TcpStream>),
}

/// The connections whose clients have not shown who they are, by where they come from. Numbers grow with age's end: the
/// lowest is the oldest.
#[derive(Default)]
struct Unproven {
    total: usize,
    by_origin: HashMap<IpAddr, Vec<Number>>,
}

impl Unproven {
    fn add(&mut self, source: SocketAddr, number: Number) {
        self.total += 1;
        self.by_origin.entry(origin(source)).or_default().push(number);
    }

    fn remove(&mut self, source: SocketAddr, number: Number) {
        let origin = origin(source);
        let Some(its) = self.by_origin.get_mut(&origin) else { return };
        let before = its.len();
        its.retain(|other| *other != number);
        self.total -= before - its.len();
        if its.is_empty() {
            self.by_origin.remove(&origin);
        }
    }

    /// The oldest connection of the origin that has most; of several such origins, the one with the oldest.
    fn to_evict(&self) -> Option<Number> {
        let most = |its: &&Vec<Number>| (its.len(), std::cmp::Reverse(its.first().copied()));
        self.by_origin.values().max_by_key(most).and_then(|its| its.first().copied())
    }
}

impl Streams {
    /// Takes connections from these listeners.
    ///
    /// # Errors
    /// The system refuses to watch a listener.
    pub(super) fn new(listeners: Vec<TcpListener>) -> io::Result<Self> {
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let mut streams = Self {
            listens: Vec::new(),
            sender,
            events,
            connections: BTreeMap::new(),
            unproven: Unproven::default(),
            next: 0,
            listeners: JoinSet::new(),
            tasks: JoinSet::new(),
        };
        for listener in listeners {
            streams.listens.push(listener.local_addr()?);
            let listener = tokio::net::TcpListener::from_std(listener)?;
            streams.listeners.spawn(accept(listener, streams.sender.clone()));
        }
        Ok(streams)
    }

    /// The addresses that are listened on.
    pub(super) fn listens(&self) -> &[SocketAddr] {
        &self.listens
    }

    /// The next news.
    pub(super) async fn next(&mut self) -> StreamEvent {
        loop {
            tokio::select! {
                Some(event) = self.events.recv() => return event,
                // The task has told its end before.
                Some(_) = self.tasks.join_next() => {}
            }
        }
    }

    /// Begins to read a new connection; `None`: there are too many.
    pub(super) fn open(
        &mut self,
        stream: tokio::net::TcpStream,
        source: SocketAddr,
    ) -> Option<Opened> {
        if self.connections.len() >= CONNECTIONS_MAX {
            return None;
        }
        let evicted = match self.unproven.total >= UNPROVEN_MAX {
            true => self.unproven.to_evict(),
            false => None,
        };
        let client = evicted.and_then(|number| self.cut(number));
        let number = self.next;
        self.next += 1;
        let holder = self.task(number, |task| task.serve(stream));
        self.unproven.add(source, number);
        self.connections.insert(number, Connection { source, client: None, holder });
        Some(Opened { evicted: client, has_evicted: evicted.is_some() })
    }

    /// Where a connection comes from.
    pub(super) fn source(&self, number: Number) -> Option<SocketAddr> {
        self.connections.get(&number).map(|connection| connection.source)
    }

    /// The client of a connection.
    pub(super) fn client(&self, number: Number) -> Option<u32> {
        self.connections.get(&number).and_then(|connection| connection.client)
    }

    pub(super) fn set_client(&mut self, number: Number, client: u32) {
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.client = Some(client);
        }
    }

    /// Its client has shown who it is.
    pub(super) fn set_proven(&mut self, number: Number) {
        if let Some(connection) = self.connections.get(&number) {
            self.unproven.remove(connection.source, number);
        }
    }

    /// A packet of it was taken: it may tell one more.
    pub(super) fn took(&self, number: Number) {
        if let Some(Holder::Task { permits, .. }) = self.holder(number) {
            permits.add_permits(1);
        }
    }

    /// Sends a packet.
    pub(super) fn send(&self, number: Number, packet: &[u8]) -> Sent {
        match self.holder(number) {
            Some(Holder::Device(_)) => Sent::AtDevice,
            Some(Holder::Task { orders, .. }) => {
                match orders.try_send(Order::Send(packet.into())) {
                    Ok(()) => Sent::Taken,
                    Err(_) => Sent::Gone,
                }
            }
            None => Sent::Gone,
        }
    }

    /// Has the connection given away at the end of a frame: [`StreamEvent::Given`] tells. The connection, where that was
    /// done before.
    pub(super) fn give(&self, number: Number) -> Option<Arc<TcpStream>> {
        match self.holder(number)? {
            Holder::Device(stream) => Some(Arc::clone(stream)),
            Holder::Task { orders, .. } => {
                // One that takes no orders is over, or will be.
                let _ = orders.try_send(Order::Give);
                None
            }
        }
    }

    /// A connection was given away. What it was to send meanwhile is sent.
    ///
    /// # Errors
    /// The connection does not take that at once.
    pub(super) fn set_given(
        &mut self,
        number: Number,
        stream: TcpStream,
        mut left: mpsc::Receiver<Order>,
    ) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
        let mut frames = Vec::new();
        while let Ok(order) = left.try_recv() {
            if let Order::Send(packet) = order {
                frame::write(&packet, &mut frames).map_err(io::Error::other)?;
            }
        }
        if (&stream).write(&frames)? < frames.len() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        connection.holder = Holder::Device(Arc::new(stream));
        Ok(())
    }

    /// The device has a connection no more: last words are still sent by it, and nothing is read. On failure it is cut.
    pub(super) fn take_back(&mut self, number: Number) {
        let Some(Holder::Device(stream)) = self.holder(number) else { return };
        let stream = stream.try_clone().and_then(|stream| {
            stream.set_nonblocking(true)?;
            tokio::net::TcpStream::from_std(stream)
        });
        match stream {
            Ok(stream) => {
                let holder = self.task(number, |task| task.part(stream));
                if let Some(connection) = self.connections.get_mut(&number) {
                    connection.holder = holder;
                }
            }
            Err(error) => {
                tracing::debug!(%error, "cannot say farewell to a client");
                self.cut(number);
            }
        }
    }

    /// Ends a connection once it has sent what is to be sent.
    pub(super) fn close(&mut self, number: Number) {
        if let Some(connection) = self.connections.remove(&number) {
            self.unproven.remove(connection.source, number);
        }
    }

    /// Ends a connection at once. Returns its client.
    pub(super) fn cut(&mut self, number: Number) -> Option<u32> {
        let connection = self.connections.remove(&number)?;
        self.unproven.remove(connection.source, number);
        if let Holder::Task { task, .. } = &connection.holder {
            task.abort();
        }
        connection.client
    }

    /// Ends all connections once they have sent what is to be sent, or after a second. Nothing is told any more, and
    /// those without a client are cut.
    pub(super) async fn finish(&mut self) {
        self.listeners.abort_all();
        self.unproven = Unproven::default();
        for connection in std::mem::take(&mut self.connections).into_values() {
            if let (None, Holder::Task { task, .. }) = (connection.client, &connection.holder) {
                task.abort();
            }
        }
        let all_ended = async {
            loop {
                tokio::select! {
                    ended = self.tasks.join_next() => {
                        if ended.is_none() {
                            return;
                        }
                    }
                    // A task may wait until its news is taken.
                    Some(_) = self.events.recv() => {}
                }
            }
        };
        if tokio::time::timeout(FINISH_LIMIT, all_ended).await.is_err() {
            tracing::debug!(left = self.tasks.len(), "connections end without their last words");
        }
    }

    fn holder(&self, number: Number) -> Option<&Holder> {
        self.connections.get(&number).map(|connection| &connection.holder)
    }

    fn task<F>(&mut self, number: Number, run: impl FnOnce(Task) -> F) -> Holder
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (orders, taken) = mpsc::channel(ORDERS_MAX);
        let permits = Arc::new(Semaphore::new(PACKETS_MAX));
        let task = Task::new(number, self.sender.clone(), taken, Arc::clone(&permits));
        let task = self.tasks.spawn(run(task));
        Holder::Task { orders, permits, task }
    }
}

/// Takes connections as long as the service has room for their news; more wait in the system.
async fn accept(
    listener: tokio::net::TcpListener,
    sender: mpsc::Sender<StreamEvent>,
) -> Infallible {
    loop {
        let room = sender.reserve().await;
        match (listener.accept().await, room) {
            (Ok((stream, source)), Ok(room)) => {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "cannot speed a connection up");
                }
                room.send(StreamEvent::Opened(stream, source));
            }
            (Err(error), _) => {
                tracing::debug!(%error, "cannot take a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
            // The service has ended.
            (Ok(_), Err(_)) => std::future::pending().await,
        }
    }
}

/// The addresses that one owner may have, as one.
pub(super) fn origin(source: SocketAddr) -> IpAddr {
    match source.ip().to_canonical() {
        IpAddr::V6(address) => {
            let mask = u128::MAX << (Ipv6Addr::BITS - ORIGIN_BITS);
            Ipv6Addr::from_bits(address.to_bits() & mask).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::sockets::{Sockets, bind_all};
    use super::*;

    fn from(text: &str) -> SocketAddr {
        SocketAddr::new(text.parse().unwrap(), 1_000)
    }

    #[test]
    fn the_oldest_connection_of_the_greediest_origin_gives_way() {
        let mut unproven = Unproven::default();
        assert_eq!(unproven.to_evict(), None);
        unproven.add(from("192.0.2.1"), 0);
        unproven.add(from("192.0.2.2"), 1);
        assert_eq!(unproven.to_evict(), Some(0), "the oldest of all");
        // One owner has all of a /64.
        unproven.add(from("2001:db8::1"), 2);
        unproven.add(from("2001:db8::2"), 3);
        assert_eq!(unproven.to_evict(), Some(2));
        unproven.add(from("2001:db8:0:1::2"), 4);
        unproven.remove(from("2001:db8::1"), 2);
        unproven.remove(from("2001:db8::1"), 2);
        assert_eq!((unproven.total, unproven.to_evict()), (4, Some(0)));
        unproven.add(from("192.0.2.2"), 5);
        assert_eq!(unproven.to_evict(), Some(1));
        for (source, number) in
            [("192.0.2.1", 0), ("192.0.2.2", 1), ("192.0.2.2", 5), ("2001:db8::2", 3)]
        {
            unproven.remove(from(source), number);
        }
        assert_eq!((unproven.total, unproven.by_origin.len()), (1, 1));
    }

    /// A listener, and what comes of connections to it.
    fn streams() -> (Streams, SocketAddr) {
        let Sockets { listeners, .. } = bind_all(&["tcp:127.0.0.1:0".parse().unwrap()]).unwrap();
        let streams = Streams::new(listeners).unwrap();
        let address = streams.listens()[0];
        (streams, address)
    }

    async fn opened(streams: &mut Streams) -> Number {
        let StreamEvent::Opened(stream, source) = streams.next().await else {
            panic!("no connection")
        };
        assert!(streams.open(stream, source).is_some());
        streams.next - 1
    }

    #[tokio::test]
    async fn a_flood_of_silent_connections_makes_room_for_others() {
        let (mut streams, address) = streams();
        let mut held = Vec::new();
        for _ in 0..UNPROVEN_MAX {
            held.push(TcpStream::connect(address).unwrap());
            opened(&mut streams).await;
        }
        streams.set_client(0, 7);
        held.push(TcpStream::connect(address).unwrap());
        let StreamEvent::Opened(stream, source) = streams.next().await else { panic!("none") };
        let opened = streams.open(stream, source).unwrap();
        assert_eq!((opened.evicted, opened.has_evicted), (Some(7), true));
        assert_eq!(streams.connections.len(), UNPROVEN_MAX);
        assert_eq!((streams.unproven.total, streams.source(0)), (UNPROVEN_MAX, None));
        // Those who have shown who they are cost no place.
        streams.set_proven(1);
        streams.set_proven(1);
        assert_eq!(streams.unproven.total, UNPROVEN_MAX - 1);
    }

    #[tokio::test]
    async fn a_connection_that_waits_for_its_session_tells_no_more_and_goes_on_then() {
        use std::io::Write;
        let (mut streams, address) = streams();
        let mut other = TcpStream::connect(address).unwrap();
        let number = opened(&mut streams).await;
        for _ in 0..=PACKETS_MAX {
            other.write_all(&[0, 2, 0x28, 9]).unwrap();
        }
        for _ in 0..PACKETS_MAX {
            let StreamEvent::Packet { connection, packet } = streams.next().await else { panic!() };
            assert_eq!((connection, packet.as_slice()), (number, &[0x28, 9][..]));
        }
        let pause = Duration::from_millis(50);
        assert!(
            tokio::time::timeout(pause, streams.next()).await.is_err(),
            "one more than may wait"
        );
        streams.took(number);
        assert!(matches!(streams.next().await, StreamEvent::Packet { .. }));
    }

    #[tokio::test]
    async fn a_connection_is_given_away_at_the_end_of_a_frame_and_parts_with_its_last_words() {
        use std::io::{Read, Write};
        let (mut streams, address) = streams();
        let mut other = TcpStream::connect(address).unwrap();
        let number = opened(&mut streams).await;
        // The connection is asked for within a frame. The device's part begins behind that.
        let pause = Duration::from_millis(20);
        other.write_all(&[0, 2]).unwrap();
        tokio::time::sleep(pause).await;
        assert_eq!(streams.send(number, &[0x30, 1]), Sent::Taken);
        assert!(streams.give(number).is_none());
        tokio::time::sleep(pause).await;
        other.write_all(&[0x28, 9, 0, 3]).unwrap();
        let (given, left) = loop {
            match streams.next().await {
                StreamEvent::Given { connection, stream, left } => {
                    assert_eq!(connection, number);
                    break (stream, left);
                }
                StreamEvent::Packet { .. } => {}
                _ => panic!("something else"),
            }
        };
        let mut rest = [0; 8];
        let mut reader = given.try_clone().unwrap();
        let read = reader.read(&mut rest);
        // On a busy machine it may have been given away before the frame came.
        let read = read.map(|length| rest[..length].to_vec());
        assert!(read.as_ref().map_or(true, |bytes| bytes.ends_with(&[0, 3])), "{read:?}");
        // Ordered before the service knew.
        assert_eq!(streams.send(number, &[0x28]), Sent::Taken);
        streams.set_given(number, given, left).unwrap();
        assert_eq!(streams.send(number, &[0x20]), Sent::AtDevice);
        assert!(streams.give(number).is_some());
        streams.take_back(number);
        assert_eq!(streams.send(number, &[0x20, 7]), Sent::Taken);
        streams.close(number);
        assert_eq!(streams.send(number, &[0x20]), Sent::Gone);
        let reading = tokio::task::spawn_blocking(move || {
            let mut all = Vec::new();
            other.read_to_end(&mut all).map(|_| all)
        });
        // Nothing is told of a connection that was closed from here.
        let all = tokio::select! {
            all = reading => all.unwrap().unwrap(),
            _ = streams.next() => panic!("told"),
        };
        assert_eq!(all, [0, 2, 0x30, 1, 0, 1, 0x28, 0, 2, 0x20, 7]);
    }

    #[tokio::test]
    async fn last_words_arrive_before_all_ends() {
        use std::io::Read;
        let (mut streams, address) = streams();
        let mut other = TcpStream::connect(address).unwrap();
        let number = opened(&mut streams).await;
        streams.set_client(number, 7);
        // Nothing holds its end up.
        let _silent = TcpStream::connect(address).unwrap();
        opened(&mut streams).await;
        assert_eq!(streams.send(number, &[0x28, 9]), Sent::Taken);
        let reading = tokio::task::spawn_blocking(move || {
            let mut all = Vec::new();
            other.read_to_end(&mut all).map(|_| all)
        });
        streams.finish().await;
        assert!(streams.tasks.is_empty(), "a connection has not ended");
        drop(streams);
        assert_eq!(reading.await.unwrap().unwrap(), [0, 2, 0x28, 9]);
    }

    #[tokio::test]
    async fn garbage_and_silence_end_a_connection_with_a_reason() {
        use std::io::Write;
        let (mut streams, address) = streams();
        for (bytes, reason) in [
            (&b"\0\0"[..], connection::BAD_FRAME),
            (b"GET / HTTP/1.1\r\n\r\n", connection::BAD_FRAME),
            (b"\0\x05ab", connection::CLOSED),
        ] {
            let mut other = TcpStream::connect(address).unwrap();
            let number = opened(&mut streams).await;
            other.write_all(bytes).unwrap();
            drop(other);
            let StreamEvent::Closed { connection, reason: told } = streams.next().await else {
                panic!("{bytes:?}");
            };
            assert_eq!((connection, told), (number, reason), "{bytes:?}");
        }
    }
}
