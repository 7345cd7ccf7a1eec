//! The plugin as an engine sees it: through the real router, with a daemon in memory.
#![allow(clippy::unwrap_used)]

mod fields;
mod limits;
mod lives;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::http::router;
use super::model::Daemon;
use super::plugin::Plugin;
use super::state::State;

/// The user's options, and what the engine makes of them.
const GATEWAY: &str = "com.docker.network.gateway";

/// An engine, whose plugin can be killed.
#[derive(Clone)]
struct Docker {
    daemon: Daemon,
    plugin: Plugin<Daemon>,
    router: Router,
}

/// `docker network create`.
#[derive(Clone, Debug, Default)]
struct Create<'a> {
    id: &'a str,
    options: Value,
    ipam_options: Value,
    subnet: &'a str,
    range: &'a str,
    gateway: &'a str,
    aux: &'a [&'a str],
    v6: Option<&'a str>,
    internal: bool,
}

/// A network as the engine keeps it.
#[derive(Clone, Debug)]
struct Network {
    id: String,
    pool_id: String,
    pool: String,
    gateway: String,
    pool_v6: Option<String>,
}

/// `docker run`.
#[derive(Clone, Debug, Default)]
struct Run<'a> {
    endpoint: &'a str,
    /// The container's key; empty: one for this endpoint alone.
    sandbox: &'a str,
    name: &'a str,
    ip: &'a str,
    ip6: &'a str,
    mac: &'a str,
}

/// A running container.
#[derive(Clone, Debug)]
struct Running {
    network: Network,
    endpoint: String,
    sandbox: String,
    ip: String,
    ip6: Option<String>,
    mac: String,
    joined: Value,
}

impl Docker {
    fn new() -> Self {
        Self::with(Daemon::new())
    }

    fn with(daemon: Daemon) -> Self {
        let state: State = daemon.world().load();
        let plugin = Plugin::new(daemon.clone(), state);
        Self { daemon, router: router(plugin.clone()), plugin }
    }

    /// Kills the plugin and starts another from what is on the disk.
    fn restart(&self) -> Self {
        Self::with(self.daemon.clone())
    }

    async fn raw(&self, method: &str, body: impl Into<Body>) -> (StatusCode, Value) {
        let request = Request::post(format!("/{method}"))
            .header("Accept", "application/vnd.docker.plugins.v1.2+json")
            .body(body.into())
            .unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap())
    }

    /// Posts a body; an answer with `Err` or `Error` is a failure, as it is to the engine.
    async fn post(&self, method: &str, body: Value) -> Result<Value, String> {
        let (status, answer) = self.raw(method, body.to_string()).await;
        assert_eq!(status, StatusCode::OK);
        let key = if method.starts_with("Ipam") { "Error" } else { "Err" };
        match answer.get(key) {
            Some(error) => Err(error.as_str().unwrap().to_owned()),
            None => Ok(answer),
        }
    }

    async fn network(&self, method: &str, body: Value) -> Result<Value, String> {
        self.post(&format!("NetworkDriver.{method}"), body).await
    }

    async fn ipam(&self, method: &str, body: Value) -> Result<Value, String> {
        self.post(&format!("IpamDriver.{method}"), body).await
    }

    /// All steps of `docker network create -d weft --ipam-driver weft`, as 20.10 takes them. An
    /// engine that fails releases what it has.
    async fn create(&self, create: Create<'_>) -> Result<Network, String> {
        let request = json!({
            "AddressSpace": "weft", "Pool": create.subnet, "SubPool": create.range,
            "Options": create.ipam_options, "V6": false,
        });
        let pool = self.ipam("RequestPool", request).await?;
        let pool_id = text(&pool["PoolID"]);
        let made = self.create_with(&create, pool).await;
        if made.is_err() {
            self.ipam("ReleasePool", json!({"PoolID": pool_id})).await?;
        }
        made
    }

    async fn create_with(&self, create: &Create<'_>, pool: Value) -> Result<Network, String> {
        let pool_id = text(&pool["PoolID"]);
        let mut gateway = pool["Data"].get(GATEWAY).map(text).unwrap_or_default();
        if gateway.is_empty() || !create.gateway.is_empty() {
            let options = json!({"RequestAddressType": GATEWAY});
            gateway = self.address(&pool_id, create.gateway, options).await?;
        }
        for address in create.aux {
            self.address(&pool_id, address, Value::Null).await?;
        }
        let mut v6 = Vec::new();
        let mut pool_v6 = None;
        if let Some(subnet) = create.v6 {
            let request = json!({
                "AddressSpace": "weft", "Pool": subnet, "SubPool": "",
                "Options": create.ipam_options, "V6": true,
            });
            let pool = self.ipam("RequestPool", request).await?;
            v6.push(json!({"AddressSpace": "weft", "Pool": pool["Pool"]}));
            pool_v6 = Some(text(&pool["PoolID"]));
        }
        let mut options = json!({
            "com.docker.network.generic": create.options,
            "com.docker.network.enable_ipv6": create.v6.is_some(),
        });
        if create.internal {
            options["com.docker.network.internal"] = true.into();
        }
        let pool = text(&pool["Pool"]);
        let v4 = json!([{
            "AddressSpace": "weft", "Pool": pool, "Gateway": gateway, "AuxAddresses": null,
        }]);
        let id = create.id.to_owned();
        let request = json!({"NetworkID": id, "Options": options, "IPv4Data": v4, "IPv6Data": v6});
        self.network("CreateNetwork", request).await?;
        Ok(Network { id, pool_id, pool, gateway, pool_v6 })
    }

    /// `docker network rm`.
    async fn remove(&self, network: &Network) {
        let address = network.gateway.split('/').next();
        let request = json!({"PoolID": network.pool_id, "Address": address});
        self.ipam("ReleaseAddress", request).await.unwrap();
        for pool in [Some(&network.pool_id), network.pool_v6.as_ref()].into_iter().flatten() {
            self.ipam("ReleasePool", json!({"PoolID": pool})).await.unwrap();
        }
        self.network("DeleteNetwork", json!({"NetworkID": network.id})).await.unwrap();
    }

    async fn address(&self, pool: &str, ip: &str, options: Value) -> Result<String, String> {
        let request = json!({"PoolID": pool, "Address": ip, "Options": options});
        Ok(text(&self.ipam("RequestAddress", request).await?["Address"]))
    }

    /// `docker run`, or `docker network connect` to a running container.
    async fn run(&self, network: &Network, run: Run<'_>) -> Result<Running, String> {
        let mut options = json!({});
        if !run.name.is_empty() {
            options["com.docker.network.endpoint.name"] = run.name.into();
        }
        let ip = self.address(&network.pool_id, run.ip, options.clone()).await?;
        let mut running = Running {
            network: network.clone(),
            endpoint: run.endpoint.to_owned(),
            sandbox: [run.sandbox, run.endpoint][usize::from(run.sandbox.is_empty())].to_owned(),
            ip,
            ip6: None,
            mac: run.mac.to_owned(),
            joined: Value::Null,
        };
        if let Some(pool) = &network.pool_v6 {
            running.ip6 = Some(self.address(pool, run.ip6, options).await?);
        }
        match self.attach(&mut running).await {
            Ok(()) => Ok(running),
            Err(error) => {
                self.stop(&running).await;
                Err(error)
            }
        }
    }

    async fn attach(&self, running: &mut Running) -> Result<(), String> {
        let ids = json!({"NetworkID": running.network.id, "EndpointID": running.endpoint});
        let mut request = ids.clone();
        let ip6 = running.ip6.clone().unwrap_or_default();
        request["Interface"] =
            json!({"Address": running.ip, "AddressIPv6": ip6, "MacAddress": running.mac});
        request["Options"] = json!({
            "com.docker.network.endpoint.exposedports": [{"Proto": 6, "Port": 80}],
            "com.docker.network.portmap": [],
        });
        let answer = self.network("CreateEndpoint", request).await?;
        let filled = &answer["Interface"];
        // The engine refuses answers for fields that it has chosen.
        assert!(filled.get("Address").is_none() && filled.get("AddressIPv6").is_none());
        assert_eq!(filled.get("MacAddress").is_some(), running.mac.is_empty());
        if let Some(mac) = filled.get("MacAddress") {
            running.mac = text(mac);
        }
        let mut request = ids;
        request["SandboxKey"] = format!("/var/run/docker/netns/{}", running.sandbox).into();
        running.joined = self.network("Join", request).await?;
        Ok(())
    }

    /// `docker stop`, or `docker network disconnect`.
    async fn stop(&self, running: &Running) {
        let Running { network, endpoint, .. } = running;
        let ids = json!({"NetworkID": network.id, "EndpointID": endpoint});
        self.network("Leave", ids.clone()).await.unwrap();
        self.network("DeleteEndpoint", ids).await.unwrap();
        self.free(running).await;
    }

    async fn free(&self, running: &Running) {
        let Running { network, ip, ip6, .. } = running;
        let held = [(Some(&network.pool_id), Some(ip)), (network.pool_v6.as_ref(), ip6.as_ref())];
        for (pool, address) in held {
            if let (Some(pool), Some(address)) = (pool, address) {
                let request = json!({"PoolID": pool, "Address": address.split('/').next()});
                self.ipam("ReleaseAddress", request).await.unwrap();
            }
        }
    }

    /// Nothing is held in the daemon or in the plugin.
    async fn assert_clean(&self) {
        let state = self.plugin.state().await;
        assert!(state.is_empty(), "{state:?}");
        let world = self.daemon.world();
        assert!(world.is_clean(), "{world:?}");
        assert!(world.load().promises_as(&state));
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}
