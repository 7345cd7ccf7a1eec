//! Finds out by trying which IPsec features this kernel has.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use rustix::io::Errno;
use weft_crypto::{Cipher, SaKey};

use super::{
    Xfrm,
    codec::{self, Abilities, NEWSA},
    spec::{Direction, Limits, StateId, StateSpec, UdpPorts},
    state,
};
use crate::error::KernelError;

/// The SPI of states made to see whether the kernel takes them: reserved, so that no peer chooses it.
const TRIAL_SPI: u32 = 253;
/// Addresses for documentation (RFC 5737, RFC 3849): no packet has them.
const TRIAL_HOSTS_V4: (IpAddr, IpAddr) =
    (IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2)));
const TRIAL_HOSTS_V6: (IpAddr, IpAddr) = (
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2)),
);
/// How long one stays if this process is killed in between, in seconds.
const TRIAL_LIFETIME_S: u64 = 10;
/// A kernel looks for the cipher's name first. One built with ESP has AES-GCM, so where it knows neither
/// name it is ESP that is missing.
const NO_ESP: KernelError = KernelError::NoEsp { family: "IPv4" };
const TRIAL_PORTS: UdpPorts = UdpPorts { source: 6785, destination: 6785 };

/// The IPsec features of this kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EspSupport {
    /// The AEADs it has, the default first; at least one.
    pub ciphers: Vec<Cipher>,
    /// ESP over IPv6.
    pub ipv6: bool,
    /// ESP in UDP over IPv4 (RFC 3948).
    pub udp: bool,
    /// ESP in UDP over IPv6 (Linux 5.8).
    pub udp_ipv6: bool,
    /// States of one CPU (RFC 9611; Linux 6.13), which allow several lanes to one peer.
    pub per_cpu: bool,
}

impl Xfrm {
    /// Detects the kernel's features by adding and removing states that no packet can use. This makes the
    /// kernel load the needed modules, so a later call may find more.
    ///
    /// # Errors
    /// [`KernelError::NoEsp`] if it has no ESP over IPv4, [`KernelError::NoCipher`] if a part of each
    /// AEAD is missing, [`KernelError::NotPermitted`], or another refusal.
    pub async fn support(&self) -> Result<EspSupport, KernelError> {
        let can = self.abilities().await?;
        let (mut ciphers, mut missing) = (Vec::new(), NO_ESP);
        for cipher in [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] {
            match self.attempt(&trial(cipher, TRIAL_HOSTS_V4, None), can).await {
                Ok(_) => ciphers.push(cipher),
                Err(error @ KernelError::NoCipher { known: true, .. }) => missing = error,
                Err(KernelError::NoCipher { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let Some(cipher) = ciphers.first().copied() else { return Err(missing) };
        let ipv6 = self.takes(cipher, TRIAL_HOSTS_V6, None, can).await?;
        let udp = self.takes(cipher, TRIAL_HOSTS_V4, Some(TRIAL_PORTS), can).await?;
        let udp_ipv6 = ipv6 && self.takes(cipher, TRIAL_HOSTS_V6, Some(TRIAL_PORTS), can).await?;
        Ok(EspSupport { ciphers, ipv6, udp, udp_ipv6, per_cpu: can.per_cpu })
    }

    /// The kernel's features, detected once. Kernels without them skip the attributes unread, so the state is
    /// read back to see whether they took effect.
    pub(super) async fn abilities(&self) -> Result<Abilities, KernelError> {
        let try_out = async || {
            let all = Abilities { direction: true, per_cpu: true };
            let mut missing = NO_ESP;
            for cipher in [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] {
                let spec = StateSpec { cpu: Some(0), ..trial(cipher, TRIAL_HOSTS_V4, None) };
                match self.attempt(&spec, all).await {
                    Err(error @ KernelError::NoCipher { known: true, .. }) => missing = error,
                    Err(KernelError::NoCipher { .. }) => {}
                    result => return result,
                }
            }
            Err(missing)
        };
        self.inner.abilities.get_or_try_init(try_out).await.copied()
    }

    async fn takes(
        &self,
        cipher: Cipher,
        hosts: (IpAddr, IpAddr),
        encapsulation: Option<UdpPorts>,
        can: Abilities,
    ) -> Result<bool, KernelError> {
        match self.attempt(&trial(cipher, hosts, encapsulation), can).await {
            Ok(_) => Ok(true),
            Err(error @ (KernelError::Socket { .. } | KernelError::TimedOut { .. })) => Err(error),
            Err(_) => Ok(false),
        }
    }

    /// Adds a state, reads it back as the kernel stored it, and removes it.
    async fn attempt(&self, spec: &StateSpec, can: Abilities) -> Result<Abilities, KernelError> {
        let _one = self.inner.trial.lock().await;
        let id = spec.id();
        let mut outcome = self.add_trial(spec, can).await;
        if matches!(&outcome, Err(error) if error.is(Errno::EXIST)) {
            // Left by a process that was killed within the last seconds.
            self.remove_trial(id).await?;
            outcome = self.add_trial(spec, can).await;
        }
        outcome.map_err(|error| state::refused(error, spec))?;
        let found = self.look_up(&[id]).await.pop();
        self.remove_trial(id).await?;
        Ok(found.transpose()?.flatten().map(|state| state.told).unwrap_or_default())
    }

    async fn add_trial(
        &self,
        spec: &StateSpec,
        can: Abilities,
    ) -> Result<(), crate::netlink::error::RequestError> {
        let request = codec::new_state(spec, can).request(NEWSA);
        self.socket().change(vec![request]).await.pop().unwrap_or(Ok(()))
    }

    async fn remove_trial(&self, id: StateId) -> Result<(), KernelError> {
        self.remove_states(&[id]).await.pop().unwrap_or(Ok(false)).map(|_| ())
    }
}

fn trial(
    cipher: Cipher,
    (source, destination): (IpAddr, IpAddr),
    encapsulation: Option<UdpPorts>,
) -> StateSpec {
    StateSpec {
        direction: Direction::In,
        source,
        destination,
        spi: TRIAL_SPI,
        cipher,
        key: SaKey::from_bytes([0; 36]),
        encapsulation,
        limits: Limits::NONE,
        lifetime: Duration::from_secs(TRIAL_LIFETIME_S),
        group: None,
        cpu: None,
        mark: None,
    }
}
