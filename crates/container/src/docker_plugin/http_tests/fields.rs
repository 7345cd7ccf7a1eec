//! Requests that are not as they should be: each method, each field.

use std::collections::BTreeMap;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use serde_json::{Value, json};
use tower::ServiceExt;

use super::super::http::BODY_BYTES_MAX;
use super::super::model::READY_V4;
use super::super::options::OPTIONS_MAX;
use super::{Create, Docker, Run};

/// Each method with a request that succeeds on the host of [`prepared`].
fn table() -> Vec<(&'static str, Value)> {
    let ids = json!({"NetworkID": "n1", "EndpointID": "e1"});
    let join = json!({
        "NetworkID": "n1", "EndpointID": "e1", "SandboxKey": "/var/run/docker/netns/1",
        "Options": {"com.docker.network.portmap": null},
    });
    vec![
        (
            "IpamDriver.RequestPool",
            json!({
                "AddressSpace": "weft", "Pool": "10.40.0.0/16", "SubPool": "10.40.1.0/24",
                "Options": {"network": "shop"}, "V6": false,
            }),
        ),
        (
            "IpamDriver.RequestAddress",
            json!({
                "PoolID": "weft,weft,10.32.0.0/12", "Address": "10.32.0.77",
                "Options": {"com.docker.network.endpoint.name": "web"},
            }),
        ),
        (
            "IpamDriver.ReleaseAddress",
            json!({"PoolID": "weft,weft,10.32.0.0/12", "Address": "10.32.0.77"}),
        ),
        ("IpamDriver.ReleasePool", json!({"PoolID": "weft,weft,10.32.0.0/12"})),
        (
            "NetworkDriver.CreateNetwork",
            json!({
                "NetworkID": "n2",
                "Options": {
                    "com.docker.network.generic": {"network": "weft"},
                    "com.docker.network.enable_ipv6": false,
                    "com.docker.network.enable_ipv4": true,
                    "com.docker.network.internal": true,
                },
                "IPv4Data": [{
                    "AddressSpace": "weft", "Pool": READY_V4, "Gateway": "10.32.0.1/12",
                    "AuxAddresses": {},
                }],
                "IPv6Data": [],
            }),
        ),
        (
            "NetworkDriver.CreateEndpoint",
            json!({
                "NetworkID": "n1", "EndpointID": "e2",
                "Interface": {
                    "Address": "10.32.0.88/12", "AddressIPv6": "", "MacAddress": "02:00:00:00:00:01",
                },
                "Options": {"com.docker.network.endpoint.macaddress": "AkKsEQAC"},
            }),
        ),
        ("NetworkDriver.EndpointOperInfo", ids.clone()),
        ("NetworkDriver.Join", join),
        ("NetworkDriver.Leave", ids.clone()),
        ("NetworkDriver.DeleteEndpoint", ids),
        ("NetworkDriver.DeleteNetwork", json!({"NetworkID": "n1"})),
    ]
}

/// A host with a network and a running container.
async fn prepared() -> Docker {
    let docker = Docker::new();
    let network = docker.create(Create { id: "n1", ..Create::default() }).await.unwrap();
    docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    docker
}

/// The paths of all fields of a request.
fn paths(value: &Value, prefix: &str, found: &mut Vec<String>) {
    let Value::Object(fields) = value else {
        if let Some(first) = value.get(0) {
            paths(first, &format!("{prefix}/0"), found);
        }
        return;
    };
    for (key, value) in fields {
        let path = format!("{prefix}/{key}");
        paths(value, &path, found);
        found.push(path);
    }
}

fn failed(answer: &Value) -> Option<&str> {
    answer.get("Err").or(answer.get("Error"))?.as_str()
}

#[tokio::test]
async fn the_table_of_methods_succeeds() {
    for (method, request) in table() {
        let docker = prepared().await;
        let (status, answer) = docker.raw(method, request.to_string()).await;
        assert_eq!((status, failed(&answer)), (StatusCode::OK, None), "{method}");
    }
}

/// The answer is a success or a text, and a refusal changes nothing.
#[tokio::test]
async fn each_field_of_each_method_may_hold_anything() {
    let long = "x".repeat(100_000);
    let mut many = BTreeMap::new();
    for number in 0..=OPTIONS_MAX {
        many.insert(format!("option{number}"), "x");
    }
    let odd = [
        json!(null),
        json!(7),
        json!(-1.5e300),
        json!(true),
        json!([]),
        json!([null]),
        json!({}),
        json!([[]]),
        json!({"a": {"b": []}}),
        json!(""),
        json!("\u{0}"),
        json!("🦀"),
        json!(" "),
        json!("../../etc"),
        json!(long),
        json!("10.40.0.0/16"),
        json!("0.0.0.0/0"),
        json!("10.40.0.1/16"),
        json!("::/0"),
        json!("fd57::/64"),
        json!("ff:ff:ff:ff:ff:ff"),
        json!("00:00:00:00:00:00"),
        json!("4294967296"),
        json!(many),
        json!({long.as_str(): "x"}),
    ];
    let docker = prepared().await;
    let before = docker.plugin.state().await;
    let world = docker.daemon.world().clone();
    let mut refused = 0;
    for (method, request) in table() {
        let mut fields = Vec::new();
        paths(&request, "", &mut fields);
        assert!(!fields.is_empty());
        for field in fields {
            for value in &odd {
                let mut request = request.clone();
                *request.pointer_mut(&field).unwrap() = value.clone();
                let (status, answer) = docker.raw(method, request.to_string()).await;
                assert_eq!(status, StatusCode::OK, "{method} {field} {value}");
                let Some(error) = failed(&answer) else {
                    // Begin again with the host as it was.
                    *docker.daemon.world() = world.clone();
                    return_to(&docker, &before).await;
                    continue;
                };
                refused += 1;
                assert!(error.len() < 2_000, "{method} {field}: {error}");
                let state = docker.plugin.state().await;
                let now = docker.daemon.world().clone();
                let same = now.held == world.held
                    && now.links.len() == world.links.len()
                    && now.networks == world.networks
                    && state.holds_as(&before);
                assert!(same, "{method} {field} {value}: {error}");
                return_to(&docker, &before).await;
                *docker.daemon.world() = world.clone();
            }
        }
    }
    assert!(refused > 400, "{refused}");
}

/// Sets the plugin's state back.
async fn return_to(docker: &Docker, state: &super::super::state::State) {
    docker.plugin.replace(state.clone()).await;
}

/// A null field and an absent one mean the same.
#[tokio::test]
async fn null_is_absent() {
    for (method, request) in table() {
        let mut fields = Vec::new();
        paths(&request, "", &mut fields);
        for field in fields {
            let (mut null, mut absent) = (request.clone(), request.clone());
            *null.pointer_mut(&field).unwrap() = Value::Null;
            let (parent, key) = field.rsplit_once('/').unwrap();
            let parent = absent.pointer_mut(parent).unwrap();
            if let Value::Object(fields) = parent {
                fields.remove(key);
            }
            // The values of the user's options are texts: null among them is no text.
            if field.contains("generic/")
                || method.starts_with("Ipam") && field.starts_with("/Options/")
            {
                continue;
            }
            let one = prepared().await.raw(method, null.to_string()).await;
            let two = prepared().await.raw(method, absent.to_string()).await;
            assert_eq!(one, two, "{method} {field}");
        }
    }
}

/// The engine repeats a request without its body when the connection was lost.
#[tokio::test]
async fn a_request_without_a_body_is_refused_and_changes_nothing() {
    let docker = prepared().await;
    let before = docker.plugin.state().await;
    for (method, _) in table() {
        for body in ["", " \n", "null", "[]", "7", "\"x\"", "{", "{\"NetworkID\":", "\u{0}", "{}}"]
        {
            let (status, answer) = docker.raw(method, body).await;
            assert_eq!(status, StatusCode::OK);
            let key = if method.starts_with("Ipam") { "Error" } else { "Err" };
            let error = answer[key].as_str().unwrap();
            assert!(body.trim().len() > 1 || error.contains(method.rsplit('.').next().unwrap()));
            assert!(docker.plugin.state().await.promises_as(&before), "{method} {body}");
        }
        let nested = format!("{{\"Options\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        let (_, answer) = docker.raw(method, nested).await;
        let nothing_in_it = ["Release", "Delete", "Leave"].iter().any(|it| method.contains(it));
        assert!(failed(&answer).is_some() || nothing_in_it, "{method}");
    }
    assert!(docker.plugin.state().await.promises_as(&before));
}

#[tokio::test]
async fn a_body_that_is_too_long_is_refused_before_it_is_read() {
    let docker = prepared().await;
    for method in ["NetworkDriver.CreateEndpoint", "IpamDriver.RequestPool"] {
        let (status, answer) = docker.raw(method, vec![b' '; BODY_BYTES_MAX + 1]).await;
        assert_eq!(status, StatusCode::OK);
        assert!(failed(&answer).unwrap().contains("more than"), "{answer}");
    }
    // An image that exposes all ports.
    let ports: Vec<Value> = (1..65_536).map(|port| json!({"Proto": 6, "Port": port})).collect();
    let request = json!({
        "NetworkID": "n1", "EndpointID": "e2", "Interface": {"Address": "10.32.0.9/12"},
        "Options": {"com.docker.network.endpoint.exposedports": ports},
    });
    docker.network("CreateEndpoint", request).await.unwrap();
}

/// The engine asks these once in its life, and never again if they fail.
#[tokio::test]
async fn activation_and_capabilities_do_not_depend_on_the_body() {
    let docker = Docker::new();
    docker.daemon.world().is_ready = false;
    for body in ["", "{}", "null", "rubbish", "[1"] {
        let (status, answer) = docker.raw("Plugin.Activate", body).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(answer, json!({"Implements": ["NetworkDriver", "IpamDriver"]}));
        let (status, answer) = docker.raw("NetworkDriver.GetCapabilities", body).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(
            (&answer["Scope"], &answer["ConnectivityScope"]),
            (&json!("local"), &json!("global"))
        );
        let (status, answer) = docker.raw("IpamDriver.GetCapabilities", body).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(answer, json!({"RequiresMACAddress": false, "RequiresRequestReplay": false}));
        let (_, answer) = docker.raw("IpamDriver.GetDefaultAddressSpaces", body).await;
        let spaces = [&answer["LocalDefaultAddressSpace"], &answer["GlobalDefaultAddressSpace"]];
        assert_eq!(spaces, [&json!("weft"); 2], "one name, so that newer engines skip a check");
        let (_, answer) = docker.raw("NetworkDriver.GwAllocCheck", body).await;
        assert_eq!(answer, json!({"SkipIPv4": true, "SkipIPv6": true}));
        for method in [
            "ProgramExternalConnectivity",
            "RevokeExternalConnectivity",
            "DiscoverNew",
            "DiscoverDelete",
            "FreeNetwork",
        ] {
            let (status, answer) = docker.raw(&format!("NetworkDriver.{method}"), body).await;
            assert_eq!((status, answer), (StatusCode::OK, json!({})));
        }
    }
    let error = docker.network("AllocateNetwork", json!({})).await.unwrap_err();
    assert!(error.contains("scope local"), "{error}");
    let (status, answer) = docker.raw("NetworkDriver.Teleport", "{}").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(answer["Err"].as_str().unwrap().contains("NetworkDriver.Teleport"));
}

#[tokio::test]
async fn a_content_type_makes_no_difference() {
    let docker = Docker::new();
    for content_type in ["application/json", "text/plain", "application/octet-stream"] {
        let request = Request::post("/IpamDriver.RequestPool")
            .header("Content-Type", content_type)
            .header("Host", "")
            .body(Body::from(json!({"Pool": READY_V4}).to_string()))
            .unwrap();
        let response = docker.router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
    }
    let get = Request::get("/Plugin.Activate").body(Body::empty()).unwrap();
    let response = docker.router.clone().oneshot(get).await.unwrap();
    assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test]
async fn giving_back_an_unknown_thing_succeeds() {
    let docker = Docker::new();
    let ids = json!({"NetworkID": "n9", "EndpointID": "e9"});
    // Nothing can have these names, so giving it back is done.
    let strange = json!({"NetworkID": "", "EndpointID": "../🦀"});
    for (method, body) in [
        ("NetworkDriver.Leave", strange.clone()),
        ("NetworkDriver.DeleteEndpoint", strange.clone()),
        ("NetworkDriver.DeleteNetwork", strange),
        ("IpamDriver.ReleaseAddress", json!({"PoolID": "x", "Address": "10.0.0"})),
        ("NetworkDriver.Leave", ids.clone()),
        ("NetworkDriver.DeleteEndpoint", ids.clone()),
        ("NetworkDriver.DeleteNetwork", ids.clone()),
        ("IpamDriver.ReleaseAddress", json!({"PoolID": "x", "Address": "10.0.0.1"})),
        ("IpamDriver.ReleasePool", json!({"PoolID": "x"})),
    ] {
        let (_, answer) = docker.raw(method, body.to_string()).await;
        assert_eq!(answer, json!({}), "{method}");
    }
    for (method, part) in
        [("CreateEndpoint", "no record of network"), ("Join", "no record of network")]
    {
        let error = docker.network(method, ids.clone()).await.unwrap_err();
        assert!(error.contains(part) && error.contains("docker network rm"), "{error}");
    }
    docker.assert_clean().await;
}
