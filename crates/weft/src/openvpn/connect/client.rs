//! From one attempt to the next: servers, pauses, and what outlives a session.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow, bail};
use rustls::ClientConfig;
use serde_json::json;
use tokio::time::timeout;
use weft_kernel::Kernel;
use weft_openvpn::config::ClientProfile;
use weft_openvpn::key_method::{Credentials, IvProto, LinkOptions, PeerInfo};
use weft_openvpn::messages::Advance;
use weft_openvpn::session::{ClientOptions, Features, Session, Timing};
use weft_openvpn::wrap::WrapKeys;

use super::args::OpenvpnConnectArgs;
use super::holdings::Holdings;
use super::host::HostSide;
use super::link::{Link, Outcome};
use super::login::Login;
use super::remotes::{Next, Rotation, Server};
use super::report::Report;
use super::signals::{Signals, Wish};
use super::tls;
use super::tunnel::Tunnel;
use super::wire::Wire;

/// How long a server may take until its first word, unless the profile says otherwise.
const FIRST_WORD_LIMIT: Duration = Duration::from_secs(10);
/// How long a name may take to be looked up.
const LOOKUP_LIMIT: Duration = Duration::from_secs(10);
/// The pause before a lost connection is made anew.
const AGAIN_PAUSE: Duration = Duration::from_secs(1);
/// The largest MTU that can be pushed, in bytes, as OpenVPN says it.
const PUSHED_MTU_MAX: u16 = 1_600;
/// The tunnel's MTU in the options string, in bytes.
const TUN_MTU: u16 = 1_500;

/// A client, and what it has on this host.
pub(super) struct Client {
    holdings: Holdings,
    rotation: Rotation,
    /// What names led to, in case they cannot be looked up through a tunnel that is down.
    found: BTreeMap<String, Vec<SocketAddr>>,
    tls: Arc<ClientConfig>,
    wrap: WrapKeys,
    client_key: Option<Vec<u8>>,
}

impl Client {
    /// A client of this profile. It makes the device.
    ///
    /// # Errors
    /// A certificate or key that cannot be used, or no device.
    pub(super) async fn new(
        args: &OpenvpnConnectArgs,
        profile: ClientProfile,
        report: Report,
        signals: Signals,
    ) -> anyhow::Result<Self> {
        let tls = tls::configuration(&profile.tls)?;
        let (wrap, client_key) = tls::wrapping(&profile)?;
        let random = |below: usize| {
            let number = random::<8>().map_or(0, u64::from_le_bytes);
            (number % below.max(1) as u64) as usize
        };
        let rotation = Rotation::new(&profile, random);
        let rotation = rotation.context("proto-force leaves no server: correct the profile")?;
        let kernel = Kernel::new()?;
        let tunnel = Tunnel::open(&kernel, args.engine, args.device.as_deref()).await?;
        let host = HostSide::new(kernel, &tunnel.name, tunnel.index, report);
        let login = Login::new(&profile);
        let found = BTreeMap::new();
        let holdings = Holdings { profile, report, signals, login, host, tunnel };
        Ok(Self { holdings, rotation, found, tls, wrap, client_key })
    }

    /// Connects, and connects anew, until a signal or the server ends it.
    ///
    /// # Errors
    /// Why it goes no further.
    pub(super) async fn run(&mut self) -> anyhow::Result<()> {
        loop {
            let server = self.rotation.server().clone();
            let found = self.look_up(&server).await;
            let outcome = match self.rotation.address(&found) {
                Some(address) => self.attempt(&server, address).await?,
                None => {
                    let (host, proto) = (&server.host, server.proto.name());
                    self.holdings.report.warn(&format!("{host} has no address for {proto}"));
                    Outcome::Next(Advance::Remote, Duration::ZERO)
                }
            };
            self.holdings.tunnel.drop_peer().await;
            let pause = match outcome {
                Outcome::Ended => return Ok(()),
                Outcome::Again(pause) => pause,
                Outcome::Lost => AGAIN_PAUSE,
                Outcome::Next(how, least) => match self.rotation.advance(&found, how) {
                    Next::Attempt(pause) => pause.max(least),
                    Next::GiveUp(rounds) => {
                        bail!(
                            "no server answered as it should in {rounds} rounds: see the lines above"
                        )
                    }
                },
            };
            let signals = &mut self.holdings.signals;
            if timeout(pause, signals.next()).await == Ok(Wish::End) {
                return Ok(());
            }
        }
    }

    /// Takes back all that was set up.
    ///
    /// # Errors
    /// The device cannot be removed.
    pub(super) async fn close(mut self) -> anyhow::Result<()> {
        self.holdings.host.take_back().await;
        self.holdings.tunnel.end(&self.holdings.host.kernel).await
    }

    /// The addresses of a server's name. Those found before stand in for a look-up that fails.
    async fn look_up(&mut self, server: &Server) -> Vec<SocketAddr> {
        let host = server.host.trim_matches(['[', ']']);
        let looked = timeout(LOOKUP_LIMIT, tokio::net::lookup_host((host, server.port))).await;
        let why = match looked {
            Ok(Ok(found)) => {
                let found: Vec<SocketAddr> = found.collect();
                self.found.insert(server.host.clone(), found.clone());
                return found;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer in time".to_owned(),
        };
        self.holdings.report.warn(&format!("cannot look up {}: {why}", server.host));
        let known = self.found.get(&server.host).cloned().unwrap_or_default();
        known.into_iter().map(|known| SocketAddr::new(known.ip(), server.port)).collect()
    }

    async fn attempt(&mut self, server: &Server, address: SocketAddr) -> anyhow::Result<Outcome> {
        let credentials = tokio::select! {
            credentials = self.holdings.login.credentials() => credentials?,
            () = self.holdings.signals.end() => return Ok(Outcome::Ended),
        };
        let proto = server.proto.name();
        let (line, shown) = (format!("connecting to {address} by {proto}"), address.to_string());
        self.holdings.report.tell("connecting", &line, json!({ "remote": shown, "proto": proto }));
        self.holdings.host.keep_out(address.ip()).await;
        let limit = self
            .holdings
            .profile
            .connect_timeout_s
            .map(|limit_s| Duration::from_secs(limit_s.into()));
        let limit = limit.unwrap_or(FIRST_WORD_LIMIT);
        let (local, port) = (self.local()?, self.holdings.profile.local_port.unwrap_or(0));
        let opened = tokio::select! {
            opened = timeout(limit, Wire::open(address, server.proto.is_tcp, local, port)) => opened,
            () = self.holdings.signals.end() => return Ok(Outcome::Ended),
        };
        let wire = match opened {
            Ok(Ok(wire)) => wire,
            Ok(Err(error)) => {
                self.holdings.report.warn(&format!("no connection to {address}: {error}"));
                return Ok(Outcome::Next(Advance::Address, Duration::ZERO));
            }
            Err(_) => {
                self.holdings.report.warn(&format!("no answer from {address}"));
                return Ok(Outcome::Next(Advance::Address, Duration::ZERO));
            }
        };
        let options = self.options(server, credentials)?;
        let unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let session = Session::connect(Instant::now(), unix_s, options, address, &random::<32>()?)?;
        let mut link = Link::new(&mut self.holdings, session, wire, server.proto.is_tcp, limit);
        let outcome = link.run().await;
        if link.was_connected() {
            self.rotation.connected();
        }
        outcome
    }

    /// The source address that the profile asks for.
    fn local(&self) -> anyhow::Result<Option<IpAddr>> {
        let Some(local) = &self.holdings.profile.local else { return Ok(None) };
        let parsed = local.parse().with_context(|| format!("local {local} is no address"));
        parsed.map(Some)
    }

    fn options(&self, server: &Server, credentials: Credentials) -> anyhow::Result<ClientOptions> {
        let tls = &self.holdings.profile.tls;
        let seconds = |seconds: u32| Duration::from_secs(seconds.into());
        Ok(ClientOptions {
            tls: self.tls.clone(),
            server_name: tls::server_name()?,
            timing: Timing {
                hand_window: seconds(tls.handshake_s),
                transition_window: seconds(tls.transition_s),
                renegotiate_after: (tls.renew_s > 0).then(|| seconds(tls.renew_s)),
            },
            ciphers: tls.ciphers.clone(),
            fallback: tls.fallback,
            features: Features::default(),
            link: LinkOptions {
                tun_mtu: TUN_MTU,
                is_tcp: server.proto.is_tcp,
                cipher: tls.fallback,
                auth_digest: tls.auth_digest.clone(),
                has_tls_auth: tls.tls_auth.is_some(),
                key_direction: tls.key_direction.filter(|_| tls.tls_auth.is_some()),
            },
            credentials,
            peer_info: self.peer_info(),
            proto: IvProto::DNS_OPTION.with(IvProto::DNS_OPTION_V2).with(IvProto::PUSH_UPDATE),
            wrap: self.wrap.clone(),
            client_key: self.client_key.clone(),
            is_stream: server.proto.is_tcp,
        })
    }

    fn peer_info(&self) -> PeerInfo {
        let mut info = PeerInfo::default();
        info.set("IV_VER", concat!("weft-", env!("CARGO_PKG_VERSION")));
        info.set("IV_PLAT", "linux");
        info.set("IV_MTU", &PUSHED_MTU_MAX.to_string());
        info.set("IV_SSO", "openurl,webauth,crtext");
        for (name, value) in &self.holdings.profile.variables {
            info.set(name, value);
        }
        info
    }
}

fn random<const N: usize>() -> anyhow::Result<[u8; N]> {
    let mut bytes = [0; N];
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let filled = provider.secure_random.fill(&mut bytes);
    filled.map_err(|_| anyhow!("the system gives no random bytes"))?;
    Ok(bytes)
}
