//! The service on loopback, with an upstream server and a core that the tests play.
#![allow(clippy::unwrap_used)]

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{Name, RData, Record, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use weft_crypto::PeerId;
use weft_mesh::{HostNames, NameRecord};

use super::*;
use crate::services::names::Counters;
use crate::services::names::zone::{DEFAULT_NETWORK, Scope};
use crate::services::supervisor::{Health, Supervisor};
use crate::upkeep::store::Store;
use crate::upkeep::warnings::Warnings;

const LIMIT: Duration = Duration::from_secs(60);

fn name(text: &str) -> Name {
    Name::from_ascii(text).unwrap()
}

/// Sockets of both protocols on an address of loopback that no other test has: a port that is free for one protocol
/// may be taken for the other.
async fn bind_apart() -> (UdpSocket, TcpListener) {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let host = NEXT.fetch_add(1, Ordering::Relaxed);
    bind(([127, 0, 53, host], 0).into()).await.unwrap()
}

/// A free port of loopback, for both protocols.
async fn free_address() -> SocketAddr {
    bind_apart().await.0.local_addr().unwrap()
}

struct Service {
    address: SocketAddr,
    names: Arc<Names>,
    /// Names that the core has besides those given by hand.
    known: Arc<Mutex<Vec<NameRecord>>>,
    /// Whether the core says that these are all.
    complete: Arc<AtomicBool>,
    supervisor: Supervisor,
    _dir: tempfile::TempDir,
}

fn listener(address: SocketAddr) -> Listener {
    let clients = vec!["127.0.0.0/8".parse().unwrap()];
    let scope = Scope::Network(DEFAULT_NETWORK.into());
    Listener { address, scope, clients, forwards: true, is_exposed: false }
}

async fn start(upstreams: Vec<SocketAddr>) -> Service {
    start_with(upstreams, true).await
}

async fn start_with(upstreams: Vec<SocketAddr>, is_complete: bool) -> Service {
    let address = free_address().await;
    let dir = tempfile::tempdir().unwrap();
    let (control, mut requests) = mpsc::channel(16);
    let known = Arc::new(Mutex::new(Vec::new()));
    let complete = Arc::new(AtomicBool::new(is_complete));
    let local = PeerId::from_bytes([1; 32]);
    let feed = Feed { local, networks: Vec::new(), revision: 0 };
    let domain = name("weft.local.");
    let zone = Arc::new(Zone::build(Instant::now(), &domain, &feed));
    let names = Arc::new(Names {
        local,
        domain,
        upstreams,
        listen: Vec::new(),
        listeners: watch::Sender::new(vec![listener(address)]),
        served: watch::Sender::default(),
        zone: watch::Sender::new(zone),
        changed: watch::Sender::new(0),
        added: Mutex::default(),
        announced: Mutex::default(),
        settles_by: Instant::now() + LIMIT,
        restored: AtomicBool::new(true),
        changing: Mutex::default(),
        store: Store::open(dir.path()).unwrap(),
        warnings: Warnings::default(),
        counters: Counters::default(),
    });
    let (table, bell, all) = (Arc::clone(&known), names.bell(), Arc::clone(&complete));
    tokio::spawn(async move {
        let mut given = Vec::new();
        while let Some(request) = requests.recv().await {
            match request {
                Request::Names { reply } => {
                    let names = [table.lock().unwrap().clone(), given.clone()].concat();
                    let host =
                        HostNames { peer: local, unlinked_since: None, endpoints: vec![], names };
                    let network = |name: &str, is_internal| NetworkNames {
                        name: name.to_owned(),
                        ranges: vec!["10.32.0.0/12".parse().unwrap()],
                        is_internal,
                        hosts: vec![host.clone()],
                    };
                    let _ = reply.send(NamesSnapshot {
                        networks: vec![network(DEFAULT_NETWORK, false), network("vault", true)],
                        revision: *bell.borrow(),
                        is_complete: all.load(Ordering::Relaxed),
                    });
                }
                Request::SetNames { names, reply } => {
                    given = names;
                    bell.send_modify(|revision| *revision += 1);
                    let _ = reply.send(Ok(()));
                }
                _ => panic!("another request"),
            }
        }
    });
    let mut supervisor = Supervisor::new(tokio::runtime::Handle::current(), Health::default());
    let own = Arc::clone(&names);
    supervisor.start("names", move |pulse| serve(Arc::clone(&own), control.clone(), pulse));
    let service = Service { address, names, known, complete, supervisor, _dir: dir };
    service.give("web", [10, 32, 0, 1].into()).await;
    service
}

impl Service {
    /// Gives a name, and waits until it is answered.
    async fn give(&self, text: &str, address: IpAddr) {
        let (name, network) = (text.to_owned(), DEFAULT_NETWORK.to_owned());
        let record =
            NameRecord { name, network, addresses: vec![address], ports: vec![], is_client: false };
        self.known.lock().unwrap().push(record);
        self.names.changed.send_modify(|revision| *revision += 1);
        let begun = Instant::now();
        loop {
            let answer = {
                let full = format!("{text}.weft.local");
                tokio::time::timeout(Duration::from_millis(200), self.udp(&full)).await
            };
            if answer.is_ok_and(|answer| !answer.answers.is_empty()) {
                return;
            }
            assert!(begun.elapsed() < LIMIT);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn udp(&self, text: &str) -> Message {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.connect(self.address).await.unwrap();
        let mut buffer = vec![0; 4_096];
        // Before the socket is there, the kernel refuses; one that is being closed answers no more.
        let again = Duration::from_secs(6);
        loop {
            if socket.send(&query(text)).await.is_ok()
                && let Ok(Ok(length)) = tokio::time::timeout(again, socket.recv(&mut buffer)).await
            {
                return Message::from_vec(&buffer[..length]).unwrap();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn count(&self, counter: Counter) -> u64 {
        self.names.counters.get(counter)
    }
}

fn query(text: &str) -> Vec<u8> {
    let mut message = Message::new(rand::random(), MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    let mut absolute = name(text);
    absolute.set_fqdn(true);
    message.add_query(Query::query(absolute, RecordType::A));
    message.set_edns(Edns::new());
    message.to_vec().unwrap()
}

async fn by_tcp(stream: &mut TcpStream, bytes: &[u8]) -> Message {
    stream.write_u16(bytes.len() as u16).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = vec![0; stream.read_u16().await.unwrap().into()];
    stream.read_exact(&mut answer).await.unwrap();
    Message::from_vec(&answer).unwrap()
}

/// An upstream server: what it makes of an honest answer; `None`: silence.
type Manner = fn(&mut Message, bool) -> Option<()>;

/// Serves until its task ends; counts the questions.
async fn upstream(manner: Manner) -> (SocketAddr, Arc<Mutex<Vec<SocketAddr>>>) {
    let (udp, tcp) = bind_apart().await;
    let address = udp.local_addr().unwrap();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&asked);
    tokio::spawn(async move {
        let mut buffer = vec![0; 4_096];
        while let Ok((length, from)) = udp.recv_from(&mut buffer).await {
            noted.lock().unwrap().push(from);
            if let Some(bytes) = honest(&buffer[..length], manner, false) {
                udp.send_to(&bytes, from).await.unwrap();
            }
        }
    });
    tokio::spawn(serve_tcp(tcp, manner));
    (address, asked)
}

async fn serve_tcp(tcp: TcpListener, manner: Manner) {
    while let Ok((mut stream, _)) = tcp.accept().await {
        let mut bytes = vec![0; stream.read_u16().await.unwrap().into()];
        stream.read_exact(&mut bytes).await.unwrap();
        if let Some(answer) = honest(&bytes, manner, true) {
            stream.write_u16(answer.len() as u16).await.unwrap();
            stream.write_all(&answer).await.unwrap();
        }
    }
}

fn honest(bytes: &[u8], manner: Manner, tcp: bool) -> Option<Vec<u8>> {
    let asked = Message::from_vec(bytes).unwrap();
    let mut answer = Message::response(asked.metadata.id, OpCode::Query);
    answer.add_query(asked.queries[0].clone());
    let data = RData::A(A::new(192, 0, 2, 80));
    answer.add_answer(Record::from_rdata(asked.queries[0].name.clone(), 60, data));
    manner(&mut answer, tcp)?;
    answer.to_vec().ok()
}

const HONEST: Manner = |_, _| Some(());

async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, what).await.expect("in time")
}

#[tokio::test]
async fn names_are_answered_by_udp_and_many_by_one_connection() {
    in_time(async {
        let service = start(vec![]).await;
        let answer = service.udp("web.weft.local").await;
        assert_eq!(answer.answers[0].data, RData::A(A::new(10, 32, 0, 1)));
        service.give("db", [10, 32, 0, 2].into()).await;
        let mut stream = TcpStream::connect(service.address).await.unwrap();
        for _ in 0..50 {
            for text in ["web", "db.weft.local"] {
                assert_eq!(by_tcp(&mut stream, &query(text)).await.answers.len(), 1);
            }
            let none = by_tcp(&mut stream, &query("none.weft.local")).await;
            assert_eq!(none.metadata.response_code, ResponseCode::NXDomain);
        }
    })
    .await;
}

#[tokio::test]
async fn other_names_come_from_upstream_once_and_each_from_another_port() {
    in_time(async {
        let (address, asked) = upstream(HONEST).await;
        let service = start(vec![address]).await;
        for text in ["www.example.org", "WWW.example.ORG", "www.EXAMPLE.org"] {
            let answer = service.udp(text).await;
            assert_eq!(answer.answers[0].data, RData::A(A::new(192, 0, 2, 80)));
            assert!(answer.answers[0].name.eq_ignore_root_case(&name(text)), "{answer}");
            assert!(!answer.metadata.authoritative && answer.metadata.recursion_available);
        }
        assert_eq!(asked.lock().unwrap().len(), 1);
        assert_eq!((service.count(Counter::Forwarded), service.count(Counter::Cached)), (1, 2));
        for n in 0..20 {
            service.udp(&format!("n{n}.example.org")).await;
        }
        let ports: BTreeSet<u16> = asked.lock().unwrap().iter().map(SocketAddr::port).collect();
        assert!(ports.len() > 15, "{ports:?}");
    })
    .await;
}

#[tokio::test]
async fn the_same_question_of_many_goes_upstream_once() {
    in_time(async {
        let (address, asked) = upstream(HONEST).await;
        let service = Arc::new(start(vec![address]).await);
        let ask = |_| {
            let service = Arc::clone(&service);
            tokio::spawn(async move { service.udp("one.example.org").await.answers.len() })
        };
        let tasks: Vec<_> = (0..30).map(ask).collect();
        for task in tasks {
            assert_eq!(task.await.unwrap(), 1);
        }
        assert_eq!(asked.lock().unwrap().len(), 1);
        let all =
            [Counter::Forwarded, Counter::Joined, Counter::Cached].map(|it| service.count(it));
        assert_eq!((all[0], all.iter().sum::<u64>()), (1, 30));
    })
    .await;
}

#[tokio::test]
async fn a_server_that_fails_is_followed_by_the_next_and_a_long_answer_comes_by_tcp() {
    in_time(async {
        let fails: Manner = |it, _| {
            it.metadata.response_code = ResponseCode::ServFail;
            Some(())
        };
        let silent: Manner = |_, _| None;
        let long: Manner = |it, tcp| {
            it.metadata.truncation = !tcp;
            if !tcp {
                it.answers.clear();
            }
            Some(())
        };
        for (first, is_silent) in [(fails, false), (silent, true)] {
            let ((one, asked), two) = (upstream(first).await, upstream(long).await.0);
            let service = start(vec![one, two]).await;
            assert_eq!(service.udp("long.example.org").await.answers.len(), 1);
            for n in 0..5 {
                service.udp(&format!("n{n}.example.org")).await;
            }
            // A silent one is asked last for a while. One that refuses a name may be the one that knows others.
            assert_eq!(asked.lock().unwrap().len(), if is_silent { 1 } else { 6 });
        }
        let service = start(vec![upstream(fails).await.0]).await;
        let answer = service.udp("a.example.org").await;
        assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
        assert_eq!(service.count(Counter::Failed), 1);
        let service = start(vec![free_address().await]).await;
        let answer = service.udp("a.example.org").await;
        assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    })
    .await;
}

#[tokio::test]
async fn a_query_that_comes_back_is_refused_and_makes_no_other() {
    in_time(async {
        // The upstream server is this service, under an address that it does not know for its own.
        let relay = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let service = start(vec![relay.local_addr().unwrap()]).await;
        let to = service.address;
        tokio::spawn(async move {
            let mut buffer = vec![0; 4_096];
            let mut back = None;
            while let Ok((length, from)) = relay.recv_from(&mut buffer).await {
                let target = match from == to {
                    true => back.unwrap(),
                    false => {
                        back = Some(from);
                        to
                    }
                };
                relay.send_to(&buffer[..length], target).await.unwrap();
            }
        });
        let answer = service.udp("loop.example.org").await;
        assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
        assert_eq!((service.count(Counter::Loops), service.count(Counter::Forwarded)), (2, 1));
    })
    .await;
}

#[tokio::test]
async fn an_internal_network_and_its_own_address_as_upstream_lead_nowhere() {
    in_time(async {
        let (address, asked) = upstream(HONEST).await;
        let service = start(vec![address]).await;
        let internal = Listener { forwards: false, ..listener(service.address) };
        service.names.listeners.send_replace(vec![internal]);
        let refused = async {
            while service.udp("a.example.org").await.metadata.response_code != ResponseCode::Refused
            {
            }
        };
        refused.await;
        assert_eq!(service.udp("web").await.answers.len(), 1);
        let before = asked.lock().unwrap().len();
        service.udp("b.example.org").await;
        assert_eq!(asked.lock().unwrap().len(), before);
        let vault = Scope::Network("vault".into());
        let internal = Listener { scope: vault, ..listener(service.address) };
        service.names.listeners.send_replace(vec![internal]);
        while service.udp("web.weft.local").await.metadata.response_code != ResponseCode::NXDomain {
        }
        let answer = service.udp("c.example.org").await;
        assert_eq!(answer.metadata.response_code, ResponseCode::Refused);
        assert_eq!(asked.lock().unwrap().len(), before);
    })
    .await;
}

#[tokio::test]
async fn listeners_come_and_go_and_a_taken_address_is_told_and_tried_again() {
    in_time(async {
        let service = start(vec![]).await;
        let (udp, tcp) = bind_apart().await;
        let taken = udp.local_addr().unwrap();
        service.names.listeners.send_replace(vec![listener(taken)]);
        while !service.names.warnings.list().iter().any(|it| it.contains(&taken.to_string())) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        drop((udp, tcp));
        let moved = Service { address: taken, ..service };
        assert_eq!(moved.udp("web").await.answers.len(), 1);
        assert!(moved.names.warnings.list().is_empty(), "{:?}", moved.names.warnings.list());
        drop(moved.supervisor);
    })
    .await;
}

#[tokio::test]
async fn a_listener_that_changes_keeps_its_connections_and_loses_no_query() {
    in_time(async {
        let silent: Manner = |_, _| None;
        let (address, asked) = upstream(silent).await;
        let service = start(vec![address]).await;
        let ask = query("web.weft.local");
        let mut stream = TcpStream::connect(service.address).await.unwrap();
        assert_eq!(by_tcp(&mut stream, &ask).await.answers.len(), 1);
        // The answer to this query is still waited for, and its socket with it.
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.send_to(&query("slow.example.org"), service.address).await.unwrap();
        while asked.lock().unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let vault = Scope::Network("vault".into());
        let vault = Listener { scope: vault, ..listener(service.address) };
        let strange = Listener { clients: vec![], ..vault.clone() };
        service.names.listeners.send_replace(vec![vault]);
        while by_tcp(&mut stream, &ask).await.metadata.response_code != ResponseCode::NXDomain {}
        // One query, sent once.
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.send_to(&ask, service.address).await.unwrap();
        let mut buffer = vec![0; 4_096];
        let (length, _) = socket.recv_from(&mut buffer).await.unwrap();
        let answer = Message::from_vec(&buffer[..length]).unwrap();
        assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
        // A client that is none any more has no connection either.
        service.names.listeners.send_replace(vec![strange]);
        while service.udp("web").await.metadata.response_code != ResponseCode::Refused {}
        stream.write_u16(ask.len() as u16).await.unwrap();
        stream.write_all(&ask).await.unwrap();
        assert!(stream.read_u16().await.is_err());
    })
    .await;
}

#[tokio::test]
async fn a_client_over_its_rate_is_counted_and_others_are_answered() {
    in_time(async {
        let (address, _) = upstream(HONEST).await;
        let service = start(vec![address]).await;
        let socket = UdpSocket::bind("127.0.0.9:0").await.unwrap();
        let mut refused = 0;
        let mut buffer = vec![0; 4_096];
        for n in 0..UPSTREAM_RATE.burst + 200 {
            socket.send_to(&query(&format!("n{n}.example.org")), service.address).await.unwrap();
            let (length, _) = socket.recv_from(&mut buffer).await.unwrap();
            let answer = Message::from_vec(&buffer[..length]).unwrap();
            refused += u64::from(answer.metadata.response_code == ResponseCode::Refused);
        }
        assert_eq!(refused, service.count(Counter::RateLimited));
        assert_eq!(service.udp("other.example.org").await.answers.len(), 1);
    })
    .await;
}

#[tokio::test]
async fn a_name_that_its_host_tells_late_is_answered_late_and_not_denied() {
    in_time(async {
        let service = Arc::new(start_with(vec![], false).await);
        let ask = |text: &'static str| {
            let service = Arc::clone(&service);
            tokio::spawn(async move { service.udp(text).await })
        };
        let (late, none) = (ask("late.weft.local"), ask("none.weft.local"));
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(!late.is_finished() && !none.is_finished());
        service.give("late", [10, 32, 0, 9].into()).await;
        assert!(!none.is_finished());
        service.complete.store(true, Ordering::Relaxed);
        let (late, none) = (late.await.unwrap(), none.await.unwrap());
        assert_eq!(late.answers[0].data, RData::A(A::new(10, 32, 0, 9)));
        assert_eq!(none.metadata.response_code, ResponseCode::NXDomain);
        assert_eq!(ask("other.weft.local").await.unwrap().answers.len(), 0);
    })
    .await;
}

#[test]
fn a_look_that_takes_long_is_followed_by_a_longer_pause() {
    let ms = Duration::from_millis;
    let pauses = [ms(0), ms(10), ms(50), ms(400), ms(60_000)].map(pause_after);
    assert_eq!(pauses, [ms(100), ms(100), ms(500), ms(4_000), ms(5_000)]);
}

#[tokio::test]
async fn strangers_are_refused_and_hold_no_connection() {
    in_time(async {
        let service = start(vec![]).await;
        let strange = Listener { clients: vec![], ..listener(service.address) };
        service.names.listeners.send_replace(vec![strange]);
        while service.udp("web").await.metadata.response_code != ResponseCode::Refused {}
        let before = service.count(Counter::Strangers);
        assert!(before > 0);
        let mut stream = TcpStream::connect(service.address).await.unwrap();
        assert!(stream.read_u16().await.is_err(), "closed before it asks");
        assert_eq!(service.count(Counter::Strangers), before + 1);
    })
    .await;
}

#[tokio::test]
async fn idle_connections_are_bounded() {
    in_time(async {
        let service = start(vec![]).await;
        let mut open = Vec::new();
        for _ in 0..super::super::sockets::CONNECTIONS_PER_CLIENT_MAX + 1 {
            open.push(TcpStream::connect(service.address).await.unwrap());
        }
        // The last one is closed at once.
        assert!(open.pop().unwrap().read_u16().await.is_err());
        assert!(service.count(Counter::Overloaded) > 0);
    })
    .await;
}
