//! `weft network create`, `ls`, `rm` and `inspect`.

use std::collections::BTreeMap;

use ipnet::IpNet;
use tokio::sync::oneshot;
use weft_api::{
    ApiError, ErrorKind, Network, NetworkCreateRequest, NetworkHost, NetworkRemoveRequest,
};
use weft_crypto::PeerId;
use weft_mesh::{IpamStatus, NetworkDefinition, NetworkOptions, NetworkStatus};
use weft_path::Vni;

use super::default_range::default_ranges;
use super::{Networks, refusal, stopping};
use crate::core::networks::{NetworkList, NetworkRequest};
use crate::http::views;
use crate::timestamp;

impl Networks {
    /// Serves `weft network create`. A second creation of an equal network changes nothing.
    pub(crate) async fn create(&self, request: NetworkCreateRequest) -> Result<Network, ApiError> {
        let name = request.name.clone();
        self.create_defined(definition_of(&request)?).await?;
        self.find(&name).await
    }

    /// A network, if it is known.
    pub(crate) async fn known(&self, name: &str) -> Result<Option<Network>, ApiError> {
        Ok(self.list().await?.into_iter().find(|network| network.name == name))
    }

    /// The ranges that [`create_as`](Self::create_as) would give a network that no host knows.
    pub(crate) async fn planned(
        &self,
        name: &str,
        ranges: &[IpNet],
        weft: &[IpNet],
    ) -> Result<Vec<IpNet>, ApiError> {
        let definition = definition_of(&request_for(name, (ranges, false), weft))?;
        self.check_range(&definition).await?;
        let Some(range) = definition.range else { return Ok(weft.to_vec()) };
        let range6 = definition.range6.map(IpNet::V6);
        Ok(std::iter::once(IpNet::V4(range)).chain(range6).collect())
    }

    /// Creates a network for another face: as it is where hosts know it, else with these ranges, or with those that
    /// follow from its name, and internal or not. Ranges of `weft` mean that it shares them. False if it was created
    /// here before.
    pub(crate) async fn create_as(
        &self,
        name: &str,
        new: (&[IpNet], bool),
        weft: &[IpNet],
    ) -> Result<bool, ApiError> {
        let known = self.known(name).await?;
        if known.as_ref().is_some_and(|network| network.created) {
            return Ok(false);
        }
        let definition = match known {
            Some(_) => {
                let (reply, answer) = oneshot::channel();
                self.tell(NetworkRequest::Join { name: name.to_owned(), reply }).await;
                let joined = answer.await.map_err(|_| stopping())?;
                joined.map_err(|error| refusal(&error))?.definition
            }
            None => definition_of(&request_for(name, new, weft))?,
        };
        self.create_defined(definition).await.map(|()| true)
    }

    async fn create_defined(&self, definition: NetworkDefinition) -> Result<(), ApiError> {
        let vni = definition.vni;
        if self.standing.borrow().get(&vni).is_none_or(|it| it.held.definition != definition) {
            self.check_range(&definition).await?;
        }
        let (reply, answer) = oneshot::channel();
        self.tell(NetworkRequest::Create { definition, reply }).await;
        let held = answer.await.map_err(|_| stopping())?.map_err(|error| refusal(&error))?;
        self.wait_for(&held).await
    }

    /// Serves `weft network rm`. Returns the network as the removal left it.
    pub(crate) async fn remove(&self, request: NetworkRemoveRequest) -> Result<Network, ApiError> {
        let before = self.find(&request.name).await;
        let (reply, answer) = oneshot::channel();
        let name = request.name.clone();
        self.tell(NetworkRequest::Remove { name, reply }).await;
        let removed = answer.await.map_err(|_| stopping())?;
        match (removed, &before) {
            (Err(error), Ok(network)) if !network.here => {
                let hosts = network.hosts.iter().map(|host| host.nickname.as_str());
                let text = format!(
                    "{error}: this host does not hold it; remove it on {}",
                    hosts.collect::<Vec<_>>().join(", ")
                );
                return Err(ApiError::new(ErrorKind::NotFound, text));
            }
            (removed, _) => removed.map_err(|error| refusal(&error))?,
        }
        match self.find(&request.name).await {
            Ok(elsewhere) => Ok(elsewhere),
            // No other host has it either.
            Err(_) => {
                let gone = before?;
                let state = "elsewhere".to_owned();
                Ok(Network { here: false, created: false, ipam: None, state, ..gone })
            }
        }
    }

    /// Serves `weft network ls`: all networks that are known, `weft` first.
    pub(crate) async fn list(&self) -> Result<Vec<Network>, ApiError> {
        let (reply, answer) = oneshot::channel();
        self.tell(NetworkRequest::List { reply }).await;
        let NetworkList { networks, peers } = answer.await.map_err(|_| stopping())?;
        let names: BTreeMap<PeerId, String> =
            peers.into_iter().map(|peer| (peer.peer, peer.nickname)).collect();
        let view = |(status, ipam): (NetworkStatus, Option<IpamStatus>)| {
            self.view(&status, ipam.as_ref(), &names)
        };
        Ok(networks.into_iter().map(view).collect())
    }

    async fn find(&self, name: &str) -> Result<Network, ApiError> {
        let found = self.list().await?.into_iter().find(|network| network.name == name);
        found.ok_or_else(|| {
            let text = format!("no network {name}; weft network ls lists those that are known");
            ApiError::new(ErrorKind::NotFound, text)
        })
    }

    /// Refuses a range that this host's own routes lie in: containers would not reach their destinations.
    async fn check_range(&self, definition: &NetworkDefinition) -> Result<(), ApiError> {
        let Some(range) = definition.range else { return Ok(()) };
        self.kernel.check_range(IpNet::V4(range)).await.map_err(|error| {
            let name = &definition.name;
            let text = format!(
                "network {name} is not created: {error}; give it another range, the same on every host: weft network create --subnet RANGE {name}"
            );
            ApiError::new(ErrorKind::Conflict, text)
        })
    }

    fn view(
        &self,
        status: &NetworkStatus,
        ipam: Option<&IpamStatus>,
        names: &BTreeMap<PeerId, String>,
    ) -> Network {
        let NetworkDefinition { name, vni, range, range6, options } = &status.definition;
        let (state, reason, since) = self.state(status, ipam);
        let host = |peer: &PeerId| NetworkHost {
            peer: peer.to_hex(),
            nickname: names.get(peer).cloned().unwrap_or_default(),
        };
        let range = range.or_else(|| ipam.map(|ipam| ipam.range));
        let range6 = range6.or_else(|| ipam.and_then(|ipam| ipam.range6));
        Network {
            name: name.clone(),
            vni: vni.0,
            subnet: range.map(|range| range.to_string()),
            subnet6: range6.map(|range| range.to_string()),
            own_range: *vni == Vni::WEFT || status.definition.range.is_some(),
            internal: options.internal,
            isolated: options.isolated,
            mtu: self.mtu_of(&status.definition),
            here: status.here,
            created: status.created,
            state,
            reason,
            since,
            containers: status.containers,
            hosts: status.hosts.iter().map(host).collect(),
            clashes: status.clashes.iter().map(ToString::to_string).collect(),
            ipam: ipam.map(views::ipam),
        }
    }

    /// State, reason and since when.
    fn state(
        &self,
        status: &NetworkStatus,
        ipam: Option<&IpamStatus>,
    ) -> (String, Option<String>, Option<String>) {
        if !status.here {
            let reason = Some("only other hosts hold it".to_owned());
            return ("elsewhere".into(), reason, None);
        }
        let standing = self.standing.borrow().get(&status.definition.vni).cloned();
        let since = standing.as_ref().map(|standing| timestamp::format(standing.since));
        let waiting = || ipam.and_then(|ipam| ipam.waiting.clone());
        let (state, reason) = match standing {
            Some(standing) if standing.failure.is_some() => ("failed", standing.failure),
            None if status.definition.vni != Vni::WEFT => {
                ("waiting", Some("its devices are being made".to_owned()))
            }
            _ => match waiting() {
                Some(why) => ("waiting", Some(why)),
                None => ("ready", None),
            },
        };
        (state.into(), reason, since)
    }
}

/// The request for a network with these ranges, internal or not.
fn request_for(
    name: &str,
    (ranges, internal): (&[IpNet], bool),
    weft: &[IpNet],
) -> NetworkCreateRequest {
    let mut request = NetworkCreateRequest {
        name: name.to_owned(),
        internal,
        share_range: !ranges.is_empty() && ranges.iter().all(|range| weft.contains(range)),
        ..NetworkCreateRequest::default()
    };
    let own = if request.share_range { &[][..] } else { ranges };
    for range in own {
        match range {
            IpNet::V4(range) => _ = request.subnet.get_or_insert(*range),
            IpNet::V6(range) => _ = request.subnet6.get_or_insert(*range),
        }
    }
    request
}

/// The network that a user asks for.
fn definition_of(request: &NetworkCreateRequest) -> Result<NetworkDefinition, ApiError> {
    let NetworkCreateRequest { name, subnet, subnet6, share_range, vni, internal, mtu, isolated } =
        request;
    if *share_range && (subnet.is_some() || subnet6.is_some()) {
        let text =
            "a network has ranges of its own, or shares those of weft: leave out one of the two";
        return Err(ApiError::new(ErrorKind::BadRequest, text));
    }
    let mut definition = NetworkDefinition::new(name.clone());
    definition.vni = vni.map_or(definition.vni, Vni);
    let (internal, mtu, isolated) = (*internal, *mtu, *isolated);
    definition.options = NetworkOptions { internal, mtu, isolated, ..NetworkOptions::default() };
    if !share_range {
        let (default, default6) = default_ranges(name);
        definition.range = Some(subnet.unwrap_or(default));
        definition.range6 = Some(subnet6.unwrap_or(default6));
    }
    Ok(definition)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_the_user_leaves_out_follows_from_the_name() {
        let plain = NetworkCreateRequest { name: "shop".into(), ..NetworkCreateRequest::default() };
        let made = definition_of(&plain).unwrap();
        let (range, range6) = default_ranges("shop");
        assert_eq!((made.range, made.range6), (Some(range), Some(range6)));
        assert_eq!((made.vni, made.fault()), (weft_mesh::vni_of("shop"), None));
        let shared = NetworkCreateRequest { share_range: true, ..plain.clone() };
        let made = definition_of(&shared).unwrap();
        assert_eq!((made.range, made.range6), (None, None));
        let subnet = Some("192.168.7.0/24".parse().unwrap());
        let own = NetworkCreateRequest { subnet, vni: Some(7), mtu: Some(1_300), ..plain };
        let made = definition_of(&own).unwrap();
        assert_eq!((made.range, made.vni, made.options.mtu), (subnet, Vni(7), Some(1_300)));
        assert_eq!(made.range6, Some(range6));
        let both = NetworkCreateRequest { subnet, ..shared };
        assert!(definition_of(&both).is_err());
    }
}
