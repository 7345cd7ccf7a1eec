//! systemd-resolved on the system bus (org.freedesktop.resolve1(5)).

use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::time::Duration;

use futures_util::StreamExt;
use zbus::connection::Builder;
use zbus::{Connection, DynamicType, MatchRule, Message, MessageStream, fdo};

use super::plan::Setting;

/// The name of systemd-resolved on the bus.
pub(super) const RESOLVED: &str = "org.freedesktop.resolve1";
const OBJECT: &str = "/org/freedesktop/resolve1";
const MANAGER: &str = "org.freedesktop.resolve1.Manager";
/// The bus itself.
const BUS: &str = "org.freedesktop.DBus";
const BUS_OBJECT: &str = "/org/freedesktop/DBus";
/// The time to connect to the bus, and for each call, in milliseconds.
const CALL_LIMIT_MS: u64 = 3_000;
/// Messages of the bus that wait to be read.
const MESSAGES_MAX: NonZeroUsize = NonZeroUsize::new(16).expect("not 0");
/// Address families (the kernel's numbers).
const INET: i32 = 2;
const INET6: i32 = 10;

/// Failures on the bus.
#[derive(Debug, thiserror::Error)]
pub(super) enum BusError {
    /// There is no bus, or it does not answer.
    #[error("the system bus at {address} cannot be reached: {error}")]
    Connect {
        /// The address of the bus.
        address: String,
        /// The cause.
        error: String,
    },
    /// A call was refused or not answered.
    #[error("{method} of systemd-resolved failed: {error}")]
    Call {
        /// The name of the method.
        method: &'static str,
        /// The cause.
        error: zbus::Error,
    },
    /// The bus itself refused.
    #[error("the system bus does not tell who {RESOLVED} is: {0}")]
    Owner(zbus::Error),
}

/// A connection to the bus.
#[derive(Clone, Debug)]
pub(super) struct Bus(Connection);

/// Notices of systemd-resolved's start and end.
pub(super) struct Owners(MessageStream);

impl Owners {
    /// Waits for the next notice: systemd-resolved's unique name, or none if it has ended.
    ///
    /// # Errors
    /// `None`: the connection has ended.
    pub(super) async fn next(&mut self) -> Option<Option<String>> {
        loop {
            let message = self.0.next().await?.ok()?;
            if let Ok((name, _, owner)) = message.body().deserialize::<(String, String, String)>()
                && name == RESOLVED
            {
                return Some(Some(owner).filter(|owner| !owner.is_empty()));
            }
        }
    }
}

impl Bus {
    /// Connects to the bus at an address (D-Bus specification, section "Server Addresses").
    pub(super) async fn connect(address: &str) -> Result<Self, BusError> {
        let limit = Duration::from_millis(CALL_LIMIT_MS);
        let builder = Builder::address(address).max_queued(MESSAGES_MAX).method_timeout(limit);
        let failed = |error: String| BusError::Connect { address: address.to_owned(), error };
        match tokio::time::timeout(limit, builder.build()).await {
            Ok(built) => built.map(Self).map_err(|error| failed(error.to_string())),
            Err(_) => Err(failed(format!("it is silent for {CALL_LIMIT_MS} ms"))),
        }
    }

    /// Follows systemd-resolved's start and end from now on.
    pub(super) async fn owners(&self) -> Result<Owners, BusError> {
        let rule = MatchRule::builder().msg_type(zbus::message::Type::Signal).sender(BUS);
        let rule = rule.interface(BUS).member("NameOwnerChanged").add_arg(RESOLVED);
        let rule = rule.build().map_err(BusError::Owner)?;
        let stream = MessageStream::for_match_rule(rule, &self.0, Some(MESSAGES_MAX)).await;
        stream.map(Owners).map_err(BusError::Owner)
    }

    /// The unique name of systemd-resolved; `None` if it does not run. It is not started.
    pub(super) async fn owner(&self) -> Result<Option<String>, BusError> {
        let called =
            self.0.call_method(Some(BUS), BUS_OBJECT, Some(BUS), "GetNameOwner", &RESOLVED);
        match called.await {
            Ok(message) => message.body().deserialize().map(Some).map_err(BusError::Owner),
            Err(zbus::Error::FDO(error)) if matches!(*error, fdo::Error::NameHasNoOwner(_)) => {
                Ok(None)
            }
            Err(error) => Err(BusError::Owner(error)),
        }
    }

    /// Tells systemd-resolved (by its unique name: so it is not started) which servers know the names of a domain,
    /// and that they are asked for no others. The servers come last, so that they are never asked for others.
    pub(super) async fn set(&self, owner: &str, setting: &Setting) -> Result<(), BusError> {
        let index = setting.index.cast_signed();
        let routing_only = true;
        self.call(owner, "SetLinkDomains", &(index, vec![(&setting.domain, routing_only)])).await?;
        // Versions before 240 and 239 lack these two, and what they switch off.
        let newer = self.call(owner, "SetLinkDefaultRoute", &(index, false)).await;
        known(newer)?;
        known(self.call(owner, "SetLinkDNSOverTLS", &(index, "no")).await)?;
        // The domain is not in the public tree.
        self.call(owner, "SetLinkDNSSEC", &(index, "no")).await?;
        // By these, any container on any host could answer the host's own questions.
        self.call(owner, "SetLinkLLMNR", &(index, "no")).await?;
        self.call(owner, "SetLinkMulticastDNS", &(index, "no")).await?;
        let servers: Vec<(i32, Vec<u8>)> = setting.servers.iter().map(bytes_of).collect();
        self.call(owner, "SetLinkDNS", &(index, servers)).await?;
        Ok(())
    }

    /// Takes all settings of an interface back.
    pub(super) async fn revert(&self, owner: &str, index: u32) -> Result<(), BusError> {
        self.call(owner, "RevertLink", &index.cast_signed()).await.map(drop)
    }

    async fn call<B>(
        &self,
        owner: &str,
        method: &'static str,
        body: &B,
    ) -> Result<Message, BusError>
    where
        B: serde::Serialize + DynamicType,
    {
        let called = self.0.call_method(Some(owner), OBJECT, Some(MANAGER), method, body).await;
        called.map_err(|error| BusError::Call { method, error })
    }
}

/// Lets the lack of a method pass.
fn known(called: Result<Message, BusError>) -> Result<(), BusError> {
    match called {
        Err(BusError::Call { error: zbus::Error::FDO(error), .. })
            if matches!(*error, fdo::Error::UnknownMethod(_)) =>
        {
            Ok(())
        }
        other => other.map(drop),
    }
}

fn bytes_of(address: &IpAddr) -> (i32, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (INET, address.octets().to_vec()),
        IpAddr::V6(address) => (INET6, address.octets().to_vec()),
    }
}
