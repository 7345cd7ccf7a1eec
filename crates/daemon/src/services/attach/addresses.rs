//! Addresses for containers, which the mesh gives.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use tokio::sync::oneshot;
use weft_api::ApiError;
use weft_mesh::{AddressError, Allocation};
use weft_path::Vni;

use super::error::AttachError;
use super::{Attachments, Inner, Saved, is_stopping};
use crate::core::control::{NamesSnapshot, Request};
use crate::core::ranges::Ranges;

/// The beginning of the owner of an OpenVPN client's addresses. The mesh keeps them for the client while it is away.
pub(crate) const CLIENT_OWNER: &str = "openvpn:";

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
        if let Ok(given) = self.ask_for_addresses(owner, explicit).await? {
            return Ok(given);
        }
        let mut inner = self.lock_for_request().await?;
        self.find_addresses(&mut inner, owner, explicit).await
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
