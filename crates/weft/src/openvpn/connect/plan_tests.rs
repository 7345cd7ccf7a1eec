#![allow(clippy::unwrap_used)]

use super::*;

const REMOTE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7));

fn plan_of(profile: &ClientProfile, pushed: &[&str]) -> Result<Plan, PlanError> {
    let pushed: Vec<String> = pushed.iter().map(|text| (*text).to_owned()).collect();
    Plan::new(profile, &pushed, REMOTE)
}

fn plan(pushed: &[&str]) -> Plan {
    plan_of(&ClientProfile::default(), pushed).unwrap()
}

fn nets(list: &[&str]) -> Vec<IpNet> {
    list.iter().map(|text| text.parse().unwrap()).collect()
}

fn routes(plan: &Plan, way: Way) -> Vec<IpNet> {
    let routes = plan.routes.iter().filter(|route| route.way == way);
    routes.map(|route| route.destination).collect()
}

#[test]
fn a_subnet_gives_an_address_with_its_prefix() {
    let plan = plan(&[
        "topology subnet",
        "ifconfig 10.8.0.6 255.255.255.0",
        "ifconfig-ipv6 fd00::6/64 fd00::1",
        "route-gateway 10.8.0.1",
        "route 172.16.0.0 255.240.0.0",
        "route-ipv6 fd01::/48",
        "ping 10",
        "ping-restart 60",
        "tun-mtu 1400",
    ]);
    assert_eq!(plan.addresses, nets(&["fd00::6/64", "10.8.0.6/24"]));
    assert_eq!(routes(&plan, Way::Inside), nets(&["172.16.0.0/12", "fd01::/48"]));
    assert_eq!(routes(&plan, Way::Around), nets(&[]));
    assert_eq!(plan.keepalive, Keepalive { interval_s: 10, timeout_s: 60 });
    assert_eq!((plan.mtu, plan.ends_on_silence), (1400, false));
    assert_eq!(plan.notes, [""; 0]);
}

#[test]
fn net30_and_p2p_give_an_address_and_a_route_to_the_other_end() {
    for topology in [&["topology net30"][..], &["topology p2p"], &[]] {
        let plan = plan(&[topology, &["ifconfig 10.8.0.6 10.8.0.5"]].concat());
        assert_eq!(plan.addresses, nets(&["10.8.0.6/32"]), "{topology:?}");
        assert_eq!(routes(&plan, Way::Inside), nets(&["10.8.0.5/32"]), "{topology:?}");
    }
    let subnet = plan(&["ifconfig 10.8.0.6 255.255.0.0"]);
    assert_eq!(subnet.addresses, nets(&["10.8.0.6/16"]), "a mask says it is a subnet");
    let bad =
        plan_of(&ClientProfile::default(), &["topology subnet", "ifconfig 10.8.0.6 10.8.0.5"]);
    assert!(matches!(bad, Err(PlanError::BadAddress(_))));
}

#[test]
fn all_traffic_goes_inside_and_the_servers_own_around() {
    let everything = plan(&["redirect-gateway def1 ipv6", "dhcp-option DNS 10.8.0.1"]);
    let all: Vec<&str> = ALL_IPV4.into_iter().chain(ALL_IPV6).collect();
    assert_eq!(routes(&everything, Way::Inside), nets(&all));
    assert_eq!(routes(&everything, Way::Around), nets(&["192.0.2.7/32"]));
    assert!(everything.dns.is_for_all);
    let local = plan(&["redirect-gateway def1 local"]);
    assert_eq!(routes(&local, Way::Around), nets(&[]));
    let ipv6 = plan(&["redirect-gateway !ipv4 ipv6"]);
    assert_eq!(routes(&ipv6, Way::Inside), nets(&ALL_IPV6));
    // A route that holds the server's address would lead its packets into themselves.
    let hidden = plan(&["route 192.0.0.0 255.0.0.0"]);
    assert_eq!(routes(&hidden, Way::Around), nets(&["192.0.2.7/32"]));
    assert_eq!(
        routes(&plan(&["route remote_host 255.255.255.255 net_gateway"]), Way::Around).len(),
        1
    );
}

#[test]
fn the_profile_leaves_out_and_refuses() {
    let pushed = ["route 10.9.0.0 255.255.0.0", "dhcp-option DNS 10.8.0.1", "ping 5"];
    let nopull = ClientProfile { ignores_routes: true, ..ClientProfile::default() };
    let left = plan_of(&nopull, &pushed).unwrap();
    assert_eq!((left.routes.len(), left.dns.servers.len(), left.keepalive.interval_s), (0, 0, 5));
    let noexec = ClientProfile { sets_no_routes: true, ..ClientProfile::default() };
    assert_eq!(plan_of(&noexec, &pushed).unwrap().routes, []);
    let filter = |filter| ClientProfile { pull_filters: vec![filter], ..ClientProfile::default() };
    let ignored = plan_of(&filter(PullFilter::Ignore("route ".to_owned())), &pushed).unwrap();
    assert_eq!((ignored.routes.len(), ignored.dns.servers.len()), (0, 1));
    let rejected = plan_of(&filter(PullFilter::Reject("dhcp".to_owned())), &pushed);
    assert_eq!(rejected, Err(PlanError::Rejected("dhcp-option DNS 10.8.0.1".to_owned())));
    let own = ClientProfile { ping_exit_s: Some(30), ping_s: Some(3), ..ClientProfile::default() };
    let own = plan_of(&own, &[]).unwrap();
    assert_eq!(own.keepalive, Keepalive { interval_s: 3, timeout_s: 30 });
    assert!(own.ends_on_silence);
}

#[test]
fn names_are_asked_of_the_pushed_servers() {
    let plan = plan(&[
        "dhcp-option DNS 10.8.0.1",
        "dhcp-option DNS 10.8.0.1",
        "dhcp-option DNS6 fd00::1",
        "dhcp-option DOMAIN lan.example",
        "dns server 1 address 10.8.0.2",
        "dns search-domains corp.example",
        "dhcp-option DOMAIN --evil",
    ]);
    let servers: Vec<IpAddr> =
        ["10.8.0.1", "fd00::1", "10.8.0.2"].map(|text| text.parse().unwrap()).to_vec();
    assert_eq!(plan.dns.servers, servers);
    assert_eq!(plan.dns.domains, ["lan.example", "corp.example"]);
    assert!(!plan.dns.is_for_all && plan.notes.len() == 1);
}

#[test]
fn what_cannot_be_obeyed_is_said() {
    let compressed = plan_of(&ClientProfile::default(), &["comp-lzo adaptive"]);
    assert!(matches!(compressed, Err(PlanError::Compression(_))));
    let notes = plan(&["block-ipv6", "frobnicate 3", "ifconfig x y", "route a.example"]).notes;
    assert_eq!(notes.len(), 4, "{notes:?}");
}

#[test]
fn an_update_replaces_options_by_their_names() {
    let owned = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let mut options =
        owned(&["route 10.1.0.0 255.255.0.0", "route 10.2.0.0 255.255.0.0", "ping 5"]);
    let changes = owned(&["route 10.3.0.0 255.255.0.0", "route 10.4.0.0 255.255.0.0", "-ping"]);
    update(&mut options, &changes).unwrap();
    assert_eq!(options, owned(&["route 10.3.0.0 255.255.0.0", "route 10.4.0.0 255.255.0.0"]));
    update(&mut options, &owned(&["?cipher none"])).unwrap();
    let refused = update(&mut options, &owned(&["cipher none"]));
    assert_eq!(refused, Err(PlanError::NeedsNewConnection("cipher".to_owned())));
}

#[test]
fn the_mtu_fits_the_path() {
    assert_eq!(fitting_mtu(1_500, 1_500, REMOTE, false), 1_448);
    assert_eq!(fitting_mtu(1_400, 1_500, REMOTE, false), 1_400);
    assert_eq!(fitting_mtu(1_500, 1_500, "2001:db8::1".parse().unwrap(), true), 1_402);
    assert_eq!(fitting_mtu(1_500, 1_300, REMOTE, false), 1_280);
    assert_eq!(fitting_mtu(1_000, 1_500, REMOTE, false), 1_000);
}
