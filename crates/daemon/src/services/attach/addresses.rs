//! Addresses for containers, which the mesh gives.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::oneshot;
use tokio::time::Instant;
use weft_api::{ApiError, Attachment};
use weft_mesh::limits::{ALLOCATION_WAIT_S, CLAIM_WAIT_S};
use weft_mesh::{AddressError, Allocation};
use weft_path::Vni;

use super::error::AttachError;
use super::kept::GONE;
use super::maker::Maker;
use super::{Attachments, Inner, Locked, Saved, is_stopping};
use crate::core::control::{NamesSnapshot, Request};
use crate::core::ranges::Ranges;

/// The beginning of the owner of an OpenVPN client's addresses. The mesh keeps them for the client while it is away.
pub(crate) const CLIENT_OWNER: &str = "openvpn:";
/// The interval between two questions whether addresses can be given, in milliseconds.
const READY_POLL_MS: u64 = 100;

impl Attachments {
    /// Allocates addresses for a container on its first attach, or additional ones. Returns all of them, and
    /// the new ones.
    pub(super) async fn addresses(
        &self,
        inner: &mut Inner,
        (id, vni): (&str, Vni),
        request: &[IpNet],
        before: Option<&Saved>,
    ) -> Result<(Vec<IpNet>, Vec<IpNet>), AttachError> {
        let mut addresses = before.map(|b| b.attachment.addresses.clone()).unwrap_or_default();
        if request.is_empty() && addresses.is_empty() {
            let given = self.find_addresses(inner, (id, vni), None).await?;
            return Ok((given.clone(), given));
        }
        let mut new = Vec::new();
        for explicit in request {
            if addresses.contains(explicit) {
                continue;
            }
            match self.find_addresses(inner, (id, vni), Some(*explicit)).await {
                Ok(given) => {
                    new.extend(given.iter().copied());
                    addresses.extend(given);
                }
                Err(error) => {
                    self.give_back((id, vni), before, new).await;
                    return Err(error);
                }
            }
        }
        Ok((addresses, new))
    }

    /// Gives back addresses that an attachment has got since it was as `before`.
    pub(super) async fn give_back(
        &self,
        (id, vni): (&str, Vni),
        before: Option<&Saved>,
        new: Vec<IpNet>,
    ) {
        let owner = id.to_owned();
        let request = match before {
            Some(before) => {
                let kept = before.attachment.addresses.clone();
                Request::ReleaseSome { owner, vni, addresses: new, kept }
            }
            None => Request::Release { owner },
        };
        self.tell(request).await;
    }

    /// Requests addresses from the mesh. Takes those of an ended container if no others are free, or if the
    /// request names them.
    async fn find_addresses(
        &self,
        inner: &mut Inner,
        (id, vni): (&str, Vni),
        explicit: Option<IpNet>,
    ) -> Result<Vec<IpNet>, AttachError> {
        loop {
            let error = match self.ask_for_addresses((id, vni), explicit).await? {
                Ok(given) => return Ok(given),
                Err(error) => error,
            };
            let yields = match &error {
                AddressError::NoSpace { .. } => inner.longest_gone(vni),
                AddressError::Taken { address, .. } => inner.gone_with(vni, *address),
                _ => None,
            };
            let Some(yields) = yields.filter(|other| other != id) else {
                return Err(error.into());
            };
            tracing::info!(
                id = yields,
                "its container is gone: another container gets its addresses"
            );
            self.let_go(inner, &yields).await;
        }
    }

    async fn ask_for_addresses(
        &self,
        (id, vni): (&str, Vni),
        explicit: Option<IpNet>,
    ) -> Result<Result<Vec<IpNet>, AddressError>, ApiError> {
        let (reply, answer) = oneshot::channel();
        self.tell(Request::Addresses { owner: id.into(), vni, explicit, reply }).await;
        tokio::select! {
            answer = answer => answer.map_err(|_| is_stopping()),
            // An answer may take as long as the other hosts need. The next daemon releases what nobody has.
            () = self.inner.closed() => Err(is_stopping()),
        }
    }

    /// Allocates addresses for an owner that keeps its own record, such as Docker's plugin.
    pub(crate) async fn addresses_for(
        &self,
        owner: (&str, Vni),
        explicit: Option<IpNet>,
    ) -> Result<Vec<IpNet>, AttachError> {
        // The lock is for those of ended containers alone. Without it many ask at once, and one write to the disk
        // answers them all.
        let error = match self.ask_for_addresses(owner, explicit).await? {
            Ok(given) => return Ok(given),
            Err(error) => error,
        };
        if !is_mended_by_one_gone(&error, owner.1, &self.shown.borrow()) {
            return Err(error.into());
        }
        let mut inner = self.lock_for_request().await?;
        self.find_addresses(&mut inner, owner, explicit).await
    }

    /// Locks the attachments for a request for addresses of a network, which `needs` some unless it has them already.
    /// It waits without the lock until this host has addresses to give, so that others can attach and detach meanwhile.
    ///
    /// # Errors
    /// None can be given within the time in which the mesh answers; or the daemon stops.
    pub(super) async fn lock_for_addresses(
        &self,
        vni: Vni,
        asked: &[IpNet],
        needs: impl Fn(&Inner) -> bool + Send,
    ) -> Result<Locked<'_>, AttachError> {
        if self.delay(vni, asked).await.is_some() {
            let inner = self.lock_for_request().await?;
            let needs = needs(&inner);
            drop(inner);
            if needs {
                let wait_s = if asked.is_empty() { ALLOCATION_WAIT_S } else { CLAIM_WAIT_S };
                let limit = Duration::from_secs(wait_s);
                wait_while(limit, || self.delay(vni, asked)).await?;
            }
        }
        Ok(self.lock_for_request().await?)
    }

    /// What a request for addresses of a network waits for. Nothing once the daemon stops: then it is refused.
    async fn delay(&self, vni: Vni, asked: &[IpNet]) -> Option<String> {
        let ranges = self.ranges(vni).await.filter(|_| !self.inner.is_closed());
        ranges.and_then(|ranges| ranges.delay(asked).map(str::to_owned))
    }

    /// The addresses that this host has allocated, with their owners.
    pub(crate) async fn allocations(&self) -> Vec<Allocation> {
        let (reply, answer) = oneshot::channel();
        self.tell(Request::Allocations { reply }).await;
        answer.await.unwrap_or_default()
    }

    /// The addresses that linked hosts have announced, on all networks of this host.
    pub(crate) async fn addresses_of_others(&self) -> BTreeSet<IpAddr> {
        let (reply, answer) = oneshot::channel();
        self.tell(Request::Names { reply }).await;
        let Ok(NamesSnapshot { networks, .. }) = answer.await else { return BTreeSet::new() };
        let hosts = networks.into_iter().flat_map(|network| network.hosts);
        let others = hosts.filter(|it| it.peer != self.local && it.unlinked_since.is_none());
        let endpoints = others.flat_map(|host| host.endpoints);
        endpoints.flat_map(|it| it.addresses).map(|net| net.addr()).collect()
    }

    /// The ranges of containers' addresses on a network; `None` if this host does not hold it, or the daemon stops.
    pub(crate) async fn ranges(&self, vni: Vni) -> Option<Ranges> {
        let (reply, answer) = oneshot::channel();
        self.tell(Request::Ranges { vni, reply }).await;
        answer.await.ok()
    }
}

impl Inner {
    /// Whether an attachment with this key needs addresses that it does not have.
    pub(super) fn needs_addresses(&self, id: &str, asked: &[IpNet]) -> bool {
        let saved = self.saved.get(id);
        let has = saved.map(|saved| &saved.attachment.addresses[..]).unwrap_or_default();
        match asked {
            [] => has.is_empty(),
            asked => asked.iter().any(|net| !has.contains(net)),
        }
    }
}

/// Whether a container of the network has ended whose addresses may go to another, and that helps.
fn is_mended_by_one_gone(error: &AddressError, vni: Vni, shown: &[Attachment]) -> bool {
    let is_gone = |it: &Attachment| {
        it.state == GONE && it.made_by == Maker::Command.name() && it.vni == vni.0
    };
    matches!(error, AddressError::NoSpace { .. } | AddressError::Taken { .. })
        && shown.iter().any(is_gone)
}

/// Waits until nothing delays a request; the refusal names what does so for too long.
async fn wait_while<F>(limit: Duration, delay: impl Fn() -> F) -> Result<(), AddressError>
where
    F: Future<Output = Option<String>>,
{
    let until = Instant::now() + limit;
    while let Some(why) = delay().await {
        if Instant::now() >= until {
            return Err(AddressError::NotReady { why });
        }
        tokio::time::sleep(Duration::from_millis(READY_POLL_MS)).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::future::ready;

    use super::*;
    use crate::services::attach::kept::{ATTACHED, FAILED};

    #[tokio::test(start_paused = true)]
    async fn a_request_waits_until_addresses_can_be_given_but_not_for_ever() {
        let limit = Duration::from_secs(ALLOCATION_WAIT_S);
        let begun = Instant::now();
        let why = || Some("waiting for a link with h1".to_owned());
        let for_a_while = || ready(why().filter(|_| begun.elapsed() < limit / 2));
        wait_while(limit, for_a_while).await.unwrap();
        assert!(begun.elapsed() >= limit / 2 && begun.elapsed() < limit, "{:?}", begun.elapsed());
        let begun = Instant::now();
        let refused = wait_while(limit, || ready(why())).await.unwrap_err();
        assert_eq!(refused, AddressError::NotReady { why: why().unwrap() });
        assert!(begun.elapsed() >= limit && begun.elapsed() < 2 * limit, "{:?}", begun.elapsed());
    }

    #[test]
    fn only_a_lack_that_a_container_which_is_gone_can_mend_leads_to_the_lock() {
        let shown = |state: &str, made_by: &str, vni: u32| -> Vec<Attachment> {
            let text = format!(
                r#"[{{"id":"netns:a","name":"a","interface":"weft0","mac":"02:00:00:00:00:07","vni":{vni},
                "made_by":"{made_by}","state":"{state}","addresses":["10.32.0.1/12"],"mtu":1388,"since":""}}]"#
            );
            serde_json::from_str(&text).unwrap()
        };
        let gone = shown(GONE, "attach", 1);
        let full = AddressError::NoSpace { why: "all are full".into() };
        let (address, other) = ([10, 32, 0, 1].into(), || "x".to_owned());
        let taken = AddressError::Taken { address, container: other(), host: other() };
        for error in [&full, &taken] {
            assert!(is_mended_by_one_gone(error, Vni::WEFT, &gone), "{error}");
            for others in [
                shown(ATTACHED, "attach", 1),
                shown(FAILED, "attach", 1),
                shown(GONE, "docker", 1),
                shown(GONE, "attach", 7),
                Vec::new(),
            ] {
                assert!(!is_mended_by_one_gone(error, Vni::WEFT, &others), "{error}");
            }
        }
        let late = AddressError::NotReady { why: other() };
        assert!(!is_mended_by_one_gone(&late, Vni::WEFT, &gone));
    }
}
