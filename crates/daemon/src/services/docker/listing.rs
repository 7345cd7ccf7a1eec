//! Docker's lists of networks and endpoints, read from the engine's API.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::Ipv4Net;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::Mutex;
use weft_api::call::Method;
use weft_api::{HttpError, HttpLimits, HttpRequest};
use weft_container::docker_plugin::{ListedNetwork, ListedPool, NETWORKS_MAX};

use crate::devices::NETWORK;
use crate::services::attach::endpoints::EndpointNames;

/// Time limit for one answer of the engine, in milliseconds.
const ANSWER_LIMIT_MS: u64 = 5_000;
/// The longest answer read, in bytes: a network with thousands of containers.
const ANSWER_BYTES_MAX: usize = 16 << 20;
const LIMITS: HttpLimits =
    HttpLimits { wait: Duration::from_millis(ANSWER_LIMIT_MS), body_bytes: ANSWER_BYTES_MAX };
/// Digits of a container's short id.
const SHORT_ID_DIGITS: usize = 12;
/// Options of Docker's IPAM that name Weft's network.
const NETWORK_OPTIONS: [&str; 2] = ["network", "weft.network"];

/// Time limit for the creation of a network, in milliseconds: the engine asks the plugin meanwhile.
const CREATE_LIMIT_MS: u64 = 30_000;

/// An engine's networks.
pub(super) struct Networks {
    /// Those of Weft's drivers, by Docker's id.
    pub(super) ours: BTreeMap<String, ListedNetwork>,
    /// Names of their endpoints, by Docker's ids of these.
    pub(super) names: BTreeMap<String, EndpointNames>,
    /// Whether any network is called as the ready network.
    pub(super) has_ready: bool,
}

/// Reads the lists of one engine.
pub(super) struct Lists {
    engine: PathBuf,
    driver: String,
    /// The aliases of endpoints, by Docker's ids of these. They do not change while the endpoint is there.
    aliases: Mutex<BTreeMap<String, Vec<String>>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Network {
    #[serde(default)]
    id: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    driver: String,
    #[serde(default, rename = "IPAM")]
    ipam: Option<Ipam>,
    #[serde(default)]
    containers: Option<BTreeMap<String, Endpoint>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Ipam {
    #[serde(default)]
    driver: String,
    #[serde(default)]
    options: Option<BTreeMap<String, String>>,
    #[serde(default)]
    config: Option<Vec<Pool>>,
}

#[derive(Deserialize)]
struct Pool {
    #[serde(default, rename = "Subnet")]
    subnet: String,
    #[serde(default, rename = "IPRange")]
    range: String,
}

#[derive(Deserialize)]
struct Endpoint {
    #[serde(default, rename = "Name")]
    name: String,
    #[serde(default, rename = "EndpointID")]
    id: String,
    #[serde(default, rename = "IPv4Address")]
    v4: String,
    #[serde(default, rename = "IPv6Address")]
    v6: String,
}

#[derive(Deserialize)]
struct Container {
    #[serde(default, rename = "NetworkSettings")]
    settings: Option<Settings>,
}

#[derive(Deserialize)]
struct Settings {
    #[serde(default, rename = "Networks")]
    networks: Option<BTreeMap<String, Member>>,
}

/// A container's membership of a network.
#[derive(Deserialize)]
struct Member {
    #[serde(default, rename = "EndpointID")]
    id: String,
    #[serde(default, rename = "Aliases")]
    aliases: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Refusal {
    message: String,
}

impl Lists {
    pub(super) fn new(engine: &Path, driver: &str) -> Self {
        Self { engine: engine.to_owned(), driver: driver.to_owned(), aliases: Mutex::default() }
    }

    /// The engine's networks; `None` if no engine answers.
    ///
    /// # Errors
    /// The engine's answer cannot be used.
    pub(super) async fn read(&self) -> Result<Option<Networks>, String> {
        let Some(all) = self.get::<Vec<Network>>("/networks").await? else { return Ok(None) };
        let has_ready = all.iter().any(|network| network.name == NETWORK);
        let ours = all.into_iter().filter(|network| self.is_ours(network));
        let (mut listed, mut names) = (BTreeMap::new(), BTreeMap::new());
        for network in ours.take(NETWORKS_MAX) {
            if !is_id(&network.id) {
                return Err("a network has a malformed id".to_owned());
            }
            // The list of all networks names no endpoints.
            let path = format!("/networks/{}", network.id);
            // Without an answer it was removed meanwhile, and its endpoints before it.
            if let Some(network) = self.get::<Network>(&path).await? {
                for (container, endpoint) in network.containers.iter().flatten() {
                    let aliases = self.aliases_of(container, &endpoint.id).await;
                    let name = endpoint.name.clone();
                    names.insert(endpoint.id.clone(), EndpointNames { name, aliases });
                }
                listed.insert(network.id.clone(), self.listed(network));
            }
        }
        names.retain(|endpoint, names| !endpoint.is_empty() && !names.name.is_empty());
        self.aliases.lock().await.retain(|endpoint, _| names.contains_key(endpoint));
        Ok(Some(Networks { ours: listed, names, has_ready }))
    }

    /// The aliases of a container's endpoint. None for now if the engine does not tell: one container that it cannot
    /// inspect must not hold up the comparison of all.
    async fn aliases_of(&self, container: &str, endpoint: &str) -> Vec<String> {
        let mut known = self.aliases.lock().await;
        if let Some(aliases) = known.get(endpoint) {
            return aliases.clone();
        }
        if !is_id(container) {
            return Vec::new();
        }
        let path = format!("/containers/{container}/json");
        let Ok(Some(found)) = self.get::<Container>(&path).await else { return Vec::new() };
        let aliases = aliases_in(found, container, endpoint);
        if let Some(aliases) = &aliases {
            known.insert(endpoint.to_owned(), aliases.clone());
        }
        aliases.unwrap_or_default()
    }

    /// Creates the ready network in Docker, as `docker network create -d weft --ipam-driver weft --subnet RANGE weft`
    /// does. Engines before version 25 take `--ip` only for a network that was created with a subnet.
    ///
    /// # Errors
    /// The engine's refusal.
    pub(super) async fn create_ready(&self, range: Ipv4Net) -> Result<(), String> {
        let body = json!({
            "Name": NETWORK,
            "CheckDuplicate": true,
            "Driver": self.driver,
            "IPAM": { "Driver": self.driver, "Config": [{ "Subnet": range }] },
        });
        let request = HttpRequest {
            method: Method::Post,
            host: "docker",
            path: "/networks/create",
            body: body.to_string().into(),
        };
        let limits = HttpLimits { wait: Duration::from_millis(CREATE_LIMIT_MS), ..LIMITS };
        let answer = request.exchange(&self.engine, limits).await;
        let (status, body) = answer.map_err(|error| error.to_string())?;
        if status.is_success() {
            return Ok(());
        }
        let refusal = serde_json::from_slice::<Refusal>(&body).map(|refusal| refusal.message);
        Err(refusal.unwrap_or_else(|_| format!("the engine answers with status {status}")))
    }

    fn is_ours(&self, network: &Network) -> bool {
        let ipam = network.ipam.as_ref().map(|ipam| ipam.driver.as_str());
        network.driver == self.driver || ipam == Some(self.driver.as_str())
    }

    fn listed(&self, network: Network) -> ListedNetwork {
        let Network { driver, ipam, containers, .. } = network;
        let ipam = ipam.filter(|ipam| ipam.driver == self.driver).unwrap_or_default();
        let options = ipam.options.unwrap_or_default();
        let named = NETWORK_OPTIONS.iter().find_map(|option| options.get(*option));
        let pools = ipam.config.unwrap_or_default().into_iter().filter_map(|pool| {
            Some(ListedPool { subnet: pool.subnet.parse().ok()?, range: pool.range.parse().ok() })
        });
        let endpoints = containers.unwrap_or_default().into_values().map(|endpoint| {
            let Endpoint { id, v4, v6, .. } = endpoint;
            (id, [v4, v6].iter().filter_map(|text| address(text)).collect())
        });
        ListedNetwork {
            pools: pools.collect(),
            ipam_network: named.and_then(|name| name.parse().ok()),
            driver: driver == self.driver,
            endpoints: endpoints.filter(|(id, _): &(String, _)| !id.is_empty()).collect(),
        }
    }

    /// `None` if no engine listens, or it has no such object.
    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<Option<T>, String> {
        let request =
            HttpRequest { method: Method::Get, host: "docker", path, body: [].as_slice().into() };
        let (status, body) = match request.exchange(&self.engine, LIMITS).await {
            Ok(answer) => answer,
            Err(HttpError::Connect(_)) => return Ok(None),
            Err(error) => return Err(format!("{path}: {error}")),
        };
        match status.as_u16() {
            200 => {
                serde_json::from_slice(&body).map(Some).map_err(|error| format!("{path}: {error}"))
            }
            404 => Ok(None),
            status => Err(format!("{path}: the engine answers with status {status}")),
        }
    }
}

/// The aliases of an endpoint; `None` if the container has no such endpoint. Engines before version 25 add the short id
/// of the container, which is no name that somebody chose.
fn aliases_in(found: Container, container: &str, endpoint: &str) -> Option<Vec<String>> {
    let networks = found.settings?.networks?;
    let member = networks.into_values().find(|member| member.id == endpoint)?;
    let mut aliases = member.aliases.unwrap_or_default();
    // A name that the id happens to begin with, as `db` or `cafe`, is one that somebody chose.
    let is_short_id =
        |alias: &String| alias.len() == SHORT_ID_DIGITS && container.starts_with(alias.as_str());
    aliases.retain(|alias| !is_short_id(alias));
    Some(aliases)
}

/// An address as Docker writes it, with or without its prefix length.
fn address(text: &str) -> Option<IpAddr> {
    text.split('/').next()?.parse().ok()
}

fn is_id(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn networks_of_docker_are_read_with_their_pools_and_endpoints() {
        let lists = Lists::new(Path::new("/run/docker.sock"), "weft");
        let text = r#"{"Name":"shop","Id":"ab12","Driver":"weft","EnableIPv6":false,
            "IPAM":{"Driver":"weft","Options":{"network":"shop"},
            "Config":[{"Subnet":"10.40.0.0/16","IPRange":"10.40.1.0/24","Gateway":"10.40.0.1"},{"Subnet":""}]},
            "Containers":{"c1":{"Name":"web","EndpointID":"e1","IPv4Address":"10.40.1.2/16","IPv6Address":""},
            "ep-x":{"EndpointID":"","IPv4Address":"10.40.1.3/16"}}}"#;
        let network: Network = serde_json::from_str(text).unwrap();
        assert!(lists.is_ours(&network));
        let listed = lists.listed(network);
        assert!(listed.driver);
        assert_eq!(listed.ipam_network, Some("shop".parse().unwrap()));
        let range = Some("10.40.1.0/24".parse().unwrap());
        assert_eq!(listed.pools, [ListedPool { subnet: "10.40.0.0/16".parse().unwrap(), range }]);
        assert_eq!(
            listed.endpoints,
            [("e1".to_owned(), vec!["10.40.1.2".parse().unwrap()])].into()
        );
    }

    #[test]
    fn aliases_are_those_of_the_endpoint_without_the_short_id() {
        let read =
            |text: &str| aliases_in(serde_json::from_str(text).unwrap(), "db3456789abcdef0", "e1");
        let text = r#"{"Id":"db3456789abcdef0","NetworkSettings":{"Networks":{
            "other":{"EndpointID":"e0","Aliases":["front"]},
            "weft":{"EndpointID":"e1","Aliases":["db","db3456789abc","db34","web"]}}}}"#;
        // An alias that the id happens to begin with is a name all the same.
        assert_eq!(read(text), Some(["db", "db34", "web"].map(str::to_owned).to_vec()));
        let none =
            r#"{"NetworkSettings":{"Networks":{"weft":{"EndpointID":"e1","Aliases":null}}}}"#;
        assert_eq!(read(none), Some(Vec::new()));
        for gone in ["{}", r#"{"NetworkSettings":null}"#, r#"{"NetworkSettings":{"Networks":{}}}"#]
        {
            assert_eq!(read(gone), None, "{gone}");
        }
    }

    #[test]
    fn null_and_absent_fields_and_other_drivers_are_no_trouble() {
        let lists = Lists::new(Path::new("/run/docker.sock"), "weft");
        let text = r#"[{"Id":"1","Driver":"bridge","IPAM":{"Driver":"default","Options":null,"Config":null}},
            {"Id":"2","Driver":"null","IPAM":null,"Containers":null},
            {"Id":"3","Driver":"macvlan","IPAM":{"Driver":"weft","Config":[]}}]"#;
        let all: Vec<Network> = serde_json::from_str(text).unwrap();
        let ours: Vec<&str> =
            all.iter().filter(|it| lists.is_ours(it)).map(|it| it.id.as_str()).collect();
        assert_eq!(ours, ["3"]);
        let listed = lists.listed(all.into_iter().last().unwrap());
        assert!(!listed.driver && listed.pools.is_empty() && listed.endpoints.is_empty());
    }

    #[tokio::test]
    async fn without_an_engine_nothing_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let lists = Lists::new(&dir.path().join("docker.sock"), "weft");
        assert!(matches!(lists.read().await, Ok(None)));
    }
}
