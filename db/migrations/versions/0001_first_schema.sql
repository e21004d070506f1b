CREATE TABLE audit_log (
    number bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_audit_log PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    subject text COLLATE "C" NOT NULL,
    role text COLLATE "C" NOT NULL,
    proof text COLLATE "C" NOT NULL,
    method text COLLATE "C" NOT NULL,
    target text COLLATE "C" NOT NULL,
    peer text COLLATE "C" NOT NULL,
    request_id text COLLATE "C" NOT NULL,
    outcome text COLLATE "C" NOT NULL,
    detail text COLLATE "C" NOT NULL,
    count bigint NOT NULL DEFAULT 1,
    CONSTRAINT ck_audit_log_count CHECK (count > 0),
    CONSTRAINT ck_audit_log_outcome CHECK (outcome <> '')
);
CREATE INDEX ix_audit_log_at ON audit_log (at);
CREATE INDEX ix_audit_log_subject_number ON audit_log (subject, number);
CREATE INDEX ix_audit_log_target_number ON audit_log (target, number);

CREATE TABLE clusters (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_clusters PRIMARY KEY,
    name text COLLATE "C" NOT NULL,
    version bigint NOT NULL DEFAULT 1,
    epoch bigint NOT NULL DEFAULT 0,
    revision bigint NOT NULL DEFAULT 0,
    last_round bigint NOT NULL DEFAULT 0,
    decided_round bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    deleted_at timestamptz,
    node_version bigint NOT NULL DEFAULT 0,
    CONSTRAINT uq_clusters_name UNIQUE (name),
    CONSTRAINT ck_clusters_rounds CHECK (decided_round BETWEEN 0 AND last_round)
);

CREATE TABLE high_water (
    one boolean DEFAULT true CONSTRAINT pk_high_water PRIMARY KEY,
    version bigint NOT NULL,
    epoch bigint NOT NULL,
    revision bigint NOT NULL,
    CONSTRAINT ck_high_water_one CHECK (one)
);

CREATE UNLOGGED TABLE log_reads (
    id text COLLATE "C" CONSTRAINT pk_log_reads PRIMARY KEY,
    cluster_id bigint NOT NULL,
    agent_id bigint NOT NULL,
    client text COLLATE "C" NOT NULL,
    asked_at timestamptz NOT NULL DEFAULT now(),
    job text COLLATE "C" NOT NULL,
    job_number bigint NOT NULL,
    generation bigint NOT NULL,
    rank bigint NOT NULL,
    node text COLLATE "C" NOT NULL,
    first_byte bigint NOT NULL,
    max_bytes bigint NOT NULL,
    answered boolean NOT NULL DEFAULT false,
    answer_first_byte bigint NOT NULL DEFAULT 0,
    data bytea,
    ended boolean NOT NULL DEFAULT false,
    error text COLLATE "C" NOT NULL DEFAULT ''
);
CREATE INDEX ix_log_reads_agent_id ON log_reads (agent_id);
CREATE INDEX ix_log_reads_cluster_id ON log_reads (cluster_id);

CREATE TABLE request_ids (
    id text COLLATE "C" CONSTRAINT pk_request_ids PRIMARY KEY,
    method text COLLATE "C" NOT NULL,
    digest text COLLATE "C" NOT NULL,
    response bytea,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ix_request_ids_created_at ON request_ids (created_at);

CREATE TABLE tokens (
    id text COLLATE "C" CONSTRAINT pk_tokens PRIMARY KEY,
    name text COLLATE "C" NOT NULL,
    secret_hash bytea NOT NULL,
    role text COLLATE "C" NOT NULL,
    clusters text[] COLLATE "C",
    tenants text[] COLLATE "C",
    created_at timestamptz NOT NULL DEFAULT now(),
    created_by text COLLATE "C" NOT NULL,
    expires_at timestamptz,
    revoked_at timestamptz,
    CONSTRAINT ck_tokens_name CHECK (name <> ''),
    CONSTRAINT ck_tokens_role CHECK (role IN ('viewer', 'user', 'operator', 'admin')),
    CONSTRAINT ck_tokens_secret_hash CHECK (octet_length(secret_hash) = 32),
    CONSTRAINT ck_tokens_tenants CHECK (tenants IS NULL OR role IN ('user', 'viewer'))
);
CREATE UNIQUE INDEX uq_tokens_name ON tokens (name) WHERE revoked_at IS NULL;

CREATE TABLE agent_certificates (
    serial text COLLATE "C" CONSTRAINT pk_agent_certificates PRIMARY KEY,
    cluster_id bigint CONSTRAINT fk_agent_certificates_cluster_id REFERENCES clusters,
    cluster text COLLATE "C" NOT NULL,
    agent text COLLATE "C" NOT NULL,
    nodes text[] COLLATE "C" NOT NULL,
    issued_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    join_token text COLLATE "C" NOT NULL,
    revoked_at timestamptz,
    CONSTRAINT ck_agent_certificates_cluster
        CHECK (cluster_id IS NOT NULL OR revoked_at IS NOT NULL),
    CONSTRAINT ck_agent_certificates_nodes CHECK (cardinality(nodes) > 0),
    CONSTRAINT ck_agent_certificates_serial CHECK (serial ~ '^[1-9a-f][0-9a-f]*$')
);
CREATE INDEX ix_agent_certificates_cluster_id_agent ON agent_certificates (cluster_id, agent);
CREATE INDEX ix_agent_certificates_expires_at ON agent_certificates (expires_at);

CREATE TABLE agents (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_agents PRIMARY KEY,
    cluster_id bigint NOT NULL CONSTRAINT fk_agents_cluster_id REFERENCES clusters,
    name text COLLATE "C" NOT NULL,
    incarnation text COLLATE "C" NOT NULL,
    heard_at timestamptz NOT NULL DEFAULT now(),
    network_remarks jsonb NOT NULL DEFAULT '[]',
    deleted_nodes jsonb NOT NULL DEFAULT '[]',
    runtimes jsonb NOT NULL DEFAULT '{}',
    CONSTRAINT uq_agents_cluster_id_name UNIQUE (cluster_id, name)
);

CREATE TABLE gpu_types (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_gpu_types PRIMARY KEY,
    cluster_id bigint NOT NULL CONSTRAINT fk_gpu_types_cluster_id REFERENCES clusters,
    name text COLLATE "C" NOT NULL,
    memory_bytes bigint NOT NULL,
    ordinal bigint NOT NULL,
    dollars_per_hour float8 NOT NULL DEFAULT 0,
    watts float8 NOT NULL DEFAULT 0,
    CONSTRAINT uq_gpu_types_cluster_id_name UNIQUE (cluster_id, name),
    CONSTRAINT ck_gpu_types_dollars CHECK (dollars_per_hour >= 0 AND dollars_per_hour < 'Infinity'),
    CONSTRAINT ck_gpu_types_memory CHECK (memory_bytes > 0),
    CONSTRAINT ck_gpu_types_watts CHECK (watts >= 0 AND watts < 'Infinity')
);

CREATE TABLE job_arrays (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_job_arrays PRIMARY KEY,
    cluster_id bigint NOT NULL CONSTRAINT fk_job_arrays_cluster_id REFERENCES clusters,
    name text COLLATE "C" NOT NULL,
    tenant text COLLATE "C" NOT NULL DEFAULT '',
    size bigint NOT NULL,
    max_running bigint NOT NULL DEFAULT 0,
    ended bigint NOT NULL DEFAULT 0,
    lost bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT uq_job_arrays_cluster_id_name UNIQUE (cluster_id, name),
    CONSTRAINT ck_job_arrays_ends CHECK (lost BETWEEN 0 AND ended AND ended <= size),
    CONSTRAINT ck_job_arrays_size CHECK (size > 0 AND max_running >= 0)
);

CREATE TABLE join_tokens (
    id text COLLATE "C" CONSTRAINT pk_join_tokens PRIMARY KEY,
    secret_hash bytea NOT NULL,
    cluster_id bigint NOT NULL CONSTRAINT fk_join_tokens_cluster_id REFERENCES clusters,
    nodes text[] COLLATE "C" NOT NULL,
    uses bigint NOT NULL,
    used bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    created_by text COLLATE "C" NOT NULL,
    expires_at timestamptz NOT NULL,
    revoked_at timestamptz,
    CONSTRAINT ck_join_tokens_nodes CHECK (cardinality(nodes) > 0),
    CONSTRAINT ck_join_tokens_secret_hash CHECK (octet_length(secret_hash) = 32),
    CONSTRAINT ck_join_tokens_uses CHECK (uses > 0 AND used BETWEEN 0 AND uses)
);
CREATE INDEX ix_join_tokens_cluster_id ON join_tokens (cluster_id);

CREATE TABLE leases (
    cluster_id bigint CONSTRAINT pk_leases PRIMARY KEY CONSTRAINT fk_leases_cluster_id
        REFERENCES clusters,
    holder text COLLATE "C" NOT NULL,
    expires_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE models (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_models PRIMARY KEY,
    cluster_id bigint NOT NULL CONSTRAINT fk_models_cluster_id REFERENCES clusters,
    model text COLLATE "C" NOT NULL,
    params text COLLATE "C" NOT NULL,
    architecture text COLLATE "C" NOT NULL,
    reading jsonb NOT NULL,
    CONSTRAINT uq_models_cluster_id_model_params UNIQUE (cluster_id, model, params)
);

CREATE TABLE network_plans (
    cluster_id bigint NOT NULL CONSTRAINT fk_network_plans_cluster_id REFERENCES clusters,
    number bigint NOT NULL,
    planned_at timestamptz NOT NULL DEFAULT now(),
    cause text COLLATE "C" NOT NULL,
    round bigint NOT NULL,
    levels bigint NOT NULL,
    changed bigint NOT NULL,
    seconds float8 NOT NULL,
    notes jsonb NOT NULL DEFAULT '[]',
    CONSTRAINT pk_network_plans PRIMARY KEY (cluster_id, number),
    CONSTRAINT ck_network_plans_counts CHECK (number > 0 AND levels > 0 AND changed >= 0),
    CONSTRAINT ck_network_plans_seconds CHECK (seconds >= 0 AND seconds < 'Infinity')
);

CREATE TABLE networks (
    cluster_id bigint CONSTRAINT pk_networks PRIMARY KEY CONSTRAINT fk_networks_cluster_id
        REFERENCES clusters,
    topology text COLLATE "C" NOT NULL,
    version bigint NOT NULL DEFAULT 1,
    last_plan bigint NOT NULL DEFAULT 0
);

CREATE TABLE plans (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_plans PRIMARY KEY,
    cluster_id bigint NOT NULL CONSTRAINT fk_plans_cluster_id REFERENCES clusters,
    name text COLLATE "C" NOT NULL,
    document text COLLATE "C" NOT NULL DEFAULT '',
    CONSTRAINT uq_plans_cluster_id_name UNIQUE (cluster_id, name),
    CONSTRAINT ck_plans_digest
        CHECK (document = '' OR name = encode(sha256(convert_to(document, 'UTF8')), 'hex'))
);

CREATE TABLE policies (
    cluster_id bigint NOT NULL CONSTRAINT fk_policies_cluster_id REFERENCES clusters,
    version bigint NOT NULL,
    options jsonb,
    set_by text COLLATE "C" NOT NULL,
    set_at timestamptz NOT NULL DEFAULT now(),
    message text COLLATE "C" NOT NULL,
    CONSTRAINT pk_policies PRIMARY KEY (cluster_id, version),
    CONSTRAINT ck_policies_options CHECK (jsonb_typeof(options) = 'object'),
    CONSTRAINT ck_policies_version CHECK (version > 0)
);

CREATE TABLE rounds (
    cluster_id bigint NOT NULL CONSTRAINT fk_rounds_cluster_id REFERENCES clusters,
    number bigint NOT NULL,
    epoch bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    summary jsonb NOT NULL,
    snapshot bytea,
    base bigint,
    proof bytea,
    CONSTRAINT pk_rounds PRIMARY KEY (cluster_id, number),
    CONSTRAINT uq_rounds_cluster_id_epoch UNIQUE (cluster_id, epoch),
    CONSTRAINT ck_rounds_base CHECK (base < number),
    CONSTRAINT ck_rounds_number CHECK (number > 0)
);

CREATE TABLE tenants (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_tenants PRIMARY KEY,
    cluster_id bigint NOT NULL CONSTRAINT fk_tenants_cluster_id REFERENCES clusters,
    name text COLLATE "C" NOT NULL,
    weight float8 NOT NULL,
    borrow_gpus bigint NOT NULL DEFAULT -1,
    keeps_idle_quota boolean NOT NULL DEFAULT false,
    parent_id bigint CONSTRAINT fk_tenants_parent_id REFERENCES tenants ON DELETE SET NULL,
    CONSTRAINT uq_tenants_cluster_id_name UNIQUE (cluster_id, name),
    CONSTRAINT ck_tenants_borrow CHECK (borrow_gpus >= -1),
    CONSTRAINT ck_tenants_weight CHECK (weight >= 0 AND weight < 'Infinity')
);
CREATE INDEX ix_tenants_parent_id ON tenants (parent_id);

CREATE TABLE usage_days (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_usage_days PRIMARY KEY,
    cluster_id bigint NOT NULL CONSTRAINT fk_usage_days_cluster_id REFERENCES clusters,
    day date NOT NULL,
    tenant text COLLATE "C" NOT NULL,
    gpu_type text COLLATE "C" NOT NULL,
    submitted_by text COLLATE "C" NOT NULL,
    labels jsonb NOT NULL,
    gpu_us bigint NOT NULL,
    effective_gpu_s float8 NOT NULL,
    cpu_us bigint NOT NULL,
    host_byte_s float8 NOT NULL DEFAULT 0,
    lost_gpu_us bigint NOT NULL,
    preemptions bigint NOT NULL,
    jobs_ended bigint NOT NULL,
    jobs_finished bigint NOT NULL,
    waited_us bigint NOT NULL
);
CREATE UNIQUE INDEX uq_usage_days_group ON usage_days (cluster_id, day, tenant, gpu_type,
    submitted_by, md5(CAST(labels AS text)));

CREATE TABLE webhooks (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_webhooks PRIMARY KEY,
    cluster_id bigint NOT NULL CONSTRAINT fk_webhooks_cluster_id REFERENCES clusters,
    name text COLLATE "C" NOT NULL,
    tenant text COLLATE "C" NOT NULL DEFAULT '',
    all_tenants boolean NOT NULL DEFAULT false,
    url text COLLATE "C" NOT NULL,
    events text[] COLLATE "C" NOT NULL,
    labels jsonb NOT NULL,
    salt text COLLATE "C" NOT NULL,
    created_by text COLLATE "C" NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    delivered bigint NOT NULL DEFAULT 0,
    delivered_at timestamptz,
    failures bigint NOT NULL DEFAULT 0,
    last_error text COLLATE "C" NOT NULL DEFAULT '',
    retry_at timestamptz,
    claimed_until timestamptz,
    disabled boolean NOT NULL DEFAULT false,
    CONSTRAINT uq_webhooks_cluster_id_name UNIQUE (cluster_id, name),
    CONSTRAINT ck_webhooks_counts CHECK (delivered >= 0 AND failures >= 0),
    CONSTRAINT ck_webhooks_labels CHECK (jsonb_typeof(labels) = 'object')
);

CREATE TABLE workloads (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_workloads PRIMARY KEY,
    cluster_id bigint NOT NULL CONSTRAINT fk_workloads_cluster_id REFERENCES clusters,
    model text COLLATE "C" NOT NULL,
    params text COLLATE "C" NOT NULL,
    global_batch bigint NOT NULL,
    derived_from text COLLATE "C" NOT NULL DEFAULT '',
    waits_for jsonb,
    CONSTRAINT uq_workloads_cluster_id_model_params_global_batch
        UNIQUE (cluster_id, model, params, global_batch),
    CONSTRAINT ck_workloads_global_batch CHECK (global_batch > 0)
);

CREATE TABLE decision_pages (
    cluster_id bigint NOT NULL,
    round bigint NOT NULL,
    page bigint NOT NULL,
    first_job_id bigint NOT NULL,
    document bytea NOT NULL,
    CONSTRAINT pk_decision_pages PRIMARY KEY (cluster_id, round, page),
    CONSTRAINT fk_decision_pages_cluster_id_round FOREIGN KEY (cluster_id, round)
        REFERENCES rounds ON DELETE CASCADE
);

CREATE TABLE estimates (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_estimates PRIMARY KEY,
    workload_id bigint NOT NULL CONSTRAINT fk_estimates_workload_id REFERENCES workloads,
    gpu_type_id bigint NOT NULL CONSTRAINT fk_estimates_gpu_type_id REFERENCES gpu_types,
    gpus bigint NOT NULL,
    nodes bigint NOT NULL,
    pipeline_degree bigint NOT NULL,
    plan_id bigint NOT NULL CONSTRAINT fk_estimates_plan_id REFERENCES plans,
    iter_time_s float8 NOT NULL,
    source bigint NOT NULL,
    provenance text COLLATE "C" NOT NULL DEFAULT '',
    sd float8,
    derived boolean NOT NULL DEFAULT false,
    traffic text COLLATE "C" NOT NULL DEFAULT '',
    tuned text COLLATE "C" NOT NULL DEFAULT '',
    complete boolean NOT NULL DEFAULT false,
    cpus bigint NOT NULL DEFAULT 0,
    host_bytes bigint NOT NULL DEFAULT 0,
    stated_degree bigint,
    CONSTRAINT uq_estimates_shape
        UNIQUE (workload_id, gpu_type_id, gpus, nodes, pipeline_degree, plan_id),
    CONSTRAINT ck_estimates_demand CHECK (cpus >= 0 AND host_bytes >= 0),
    CONSTRAINT ck_estimates_iter_time CHECK (iter_time_s > 0 AND iter_time_s <= 'Infinity'),
    CONSTRAINT ck_estimates_pipeline_degree CHECK (pipeline_degree >= 0),
    CONSTRAINT ck_estimates_sd CHECK (sd >= 0 AND sd < 'Infinity'),
    CONSTRAINT ck_estimates_shape CHECK (gpus > 0 AND nodes BETWEEN 1 AND gpus),
    CONSTRAINT ck_estimates_source CHECK (source BETWEEN 0 AND 2)
);
CREATE INDEX ix_estimates_gpu_type_id ON estimates (gpu_type_id);
CREATE INDEX ix_estimates_plan_id ON estimates (plan_id);

CREATE TABLE host_profiles (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_host_profiles PRIMARY KEY,
    gpu_type_id bigint NOT NULL CONSTRAINT fk_host_profiles_gpu_type_id
        REFERENCES gpu_types ON DELETE CASCADE,
    task text COLLATE "C" NOT NULL,
    rates jsonb NOT NULL,
    added_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT uq_host_profiles_task UNIQUE (gpu_type_id, task),
    CONSTRAINT ck_host_profiles_rates CHECK (jsonb_typeof(rates) = 'object')
);

CREATE TABLE nodes (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_nodes PRIMARY KEY,
    cluster_id bigint NOT NULL CONSTRAINT fk_nodes_cluster_id REFERENCES clusters,
    name text COLLATE "C" NOT NULL,
    gpu_type_id bigint NOT NULL CONSTRAINT fk_nodes_gpu_type_id REFERENCES gpu_types,
    gpus bigint NOT NULL,
    rack text COLLATE "C" NOT NULL DEFAULT '',
    cpus bigint,
    host_bytes bigint,
    reported_cpus bigint,
    reported_host_bytes bigint,
    labels jsonb NOT NULL DEFAULT '{}',
    agent_labels jsonb NOT NULL DEFAULT '{}',
    draining boolean NOT NULL DEFAULT false,
    version bigint NOT NULL DEFAULT 1,
    agent_id bigint CONSTRAINT fk_nodes_agent_id REFERENCES agents,
    heard_at timestamptz,
    drain_reason text COLLATE "C" NOT NULL DEFAULT '',
    drained_by text COLLATE "C" NOT NULL DEFAULT '',
    drained_at timestamptz,
    health_drain boolean NOT NULL DEFAULT false,
    faults jsonb NOT NULL DEFAULT '[]',
    excused_faults jsonb NOT NULL DEFAULT '[]',
    probation_until timestamptz,
    failed_starts bigint NOT NULL DEFAULT 0,
    CONSTRAINT uq_nodes_cluster_id_name UNIQUE (cluster_id, name),
    CONSTRAINT ck_nodes_agent_labels CHECK (jsonb_typeof(agent_labels) = 'object'),
    CONSTRAINT ck_nodes_drain
        CHECK (draining OR (drained_at IS NULL AND drain_reason = '' AND drained_by = '')),
    CONSTRAINT ck_nodes_gpus CHECK (gpus BETWEEN 1 AND 64),
    CONSTRAINT ck_nodes_health_drain CHECK (draining OR NOT health_drain),
    CONSTRAINT ck_nodes_labels CHECK (jsonb_typeof(labels) = 'object'),
    CONSTRAINT ck_nodes_probation CHECK (health_drain OR probation_until IS NULL),
    CONSTRAINT ck_nodes_resources
        CHECK (cpus >= 0 AND host_bytes >= 0 AND reported_cpus >= 0 AND reported_host_bytes >= 0)
);
CREATE INDEX ix_nodes_agent_id ON nodes (agent_id);
CREATE INDEX ix_nodes_gpu_type_id ON nodes (gpu_type_id);

CREATE TABLE profile_gaps (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_profile_gaps PRIMARY KEY,
    workload_id bigint NOT NULL CONSTRAINT fk_profile_gaps_workload_id
        REFERENCES workloads ON DELETE CASCADE,
    gpu_type_id bigint NOT NULL CONSTRAINT fk_profile_gaps_gpu_type_id
        REFERENCES gpu_types ON DELETE CASCADE,
    task text COLLATE "C" NOT NULL,
    source text COLLATE "C" NOT NULL,
    left_out jsonb NOT NULL,
    reason text COLLATE "C" NOT NULL,
    added_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT uq_profile_gaps_task UNIQUE (workload_id, gpu_type_id, task, source),
    CONSTRAINT ck_profile_gaps_content
        CHECK (jsonb_typeof(left_out) = 'array' AND left_out <> '[]' AND reason <> '')
);
CREATE INDEX ix_profile_gaps_gpu_type_id ON profile_gaps (gpu_type_id);

CREATE TABLE profiles (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_profiles PRIMARY KEY,
    workload_id bigint NOT NULL CONSTRAINT fk_profiles_workload_id REFERENCES workloads,
    gpu_type_id bigint NOT NULL CONSTRAINT fk_profiles_gpu_type_id REFERENCES gpu_types,
    task text COLLATE "C" NOT NULL,
    source text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    layers bigint NOT NULL,
    samples float8 NOT NULL,
    tp bigint NOT NULL,
    dtype text COLLATE "C" NOT NULL,
    forward_s float8 NOT NULL,
    backward_s float8 NOT NULL,
    method text COLLATE "C" NOT NULL,
    repeats bigint NOT NULL,
    device_s float8 NOT NULL,
    device text COLLATE "C" NOT NULL,
    versions jsonb NOT NULL,
    date text COLLATE "C" NOT NULL,
    added_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT uq_profiles_layer UNIQUE (workload_id, gpu_type_id, task, source, kind, samples, tp),
    CONSTRAINT ck_profiles_counts CHECK (layers > 0 AND tp > 0 AND repeats > 0),
    CONSTRAINT ck_profiles_device CHECK (device_s >= 0 AND device_s < 'Infinity'),
    CONSTRAINT ck_profiles_samples CHECK (samples > 0 AND samples < 'Infinity'),
    CONSTRAINT ck_profiles_times
        CHECK (forward_s > 0 AND forward_s < 'Infinity' AND backward_s >= 0
            AND backward_s < 'Infinity')
);
CREATE INDEX ix_profiles_gpu_type_id ON profiles (gpu_type_id);

CREATE TABLE quotas (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_quotas PRIMARY KEY,
    tenant_id bigint NOT NULL CONSTRAINT fk_quotas_tenant_id REFERENCES tenants ON DELETE CASCADE,
    gpu_type_id bigint CONSTRAINT fk_quotas_gpu_type_id REFERENCES gpu_types,
    gpus bigint NOT NULL,
    CONSTRAINT ck_quotas_gpus CHECK (gpus >= 0)
);
CREATE INDEX ix_quotas_gpu_type_id ON quotas (gpu_type_id);
CREATE UNIQUE INDEX uq_quotas_tenant_id ON quotas (tenant_id, coalesce(gpu_type_id, 0));

CREATE TABLE reservations (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_reservations PRIMARY KEY,
    cluster_id bigint NOT NULL CONSTRAINT fk_reservations_cluster_id REFERENCES clusters,
    name text COLLATE "C" NOT NULL,
    version bigint NOT NULL DEFAULT 1,
    start_at timestamptz NOT NULL DEFAULT now(),
    end_at timestamptz NOT NULL DEFAULT now(),
    gpu_type_id bigint CONSTRAINT fk_reservations_gpu_type_id REFERENCES gpu_types,
    gpus bigint NOT NULL DEFAULT 0,
    tenant text COLLATE "C" NOT NULL DEFAULT '',
    label_key text COLLATE "C" NOT NULL DEFAULT '',
    label_value text COLLATE "C" NOT NULL DEFAULT '',
    maintenance boolean NOT NULL DEFAULT false,
    reason text COLLATE "C" NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT uq_reservations_cluster_id_name UNIQUE (cluster_id, name),
    CONSTRAINT ck_reservations_gpus
        CHECK (gpus >= 0 AND (gpu_type_id IS NULL) = (gpus = 0) AND (NOT maintenance OR gpus = 0)),
    CONSTRAINT ck_reservations_serves
        CHECK ((maintenance AND tenant = '' AND label_key = '') OR (NOT maintenance
            AND (tenant = '') <> (label_key = ''))),
    CONSTRAINT ck_reservations_times CHECK (start_at < end_at)
);
CREATE INDEX ix_reservations_gpu_type_id ON reservations (gpu_type_id);

CREATE TABLE tunings (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_tunings PRIMARY KEY,
    workload_id bigint NOT NULL CONSTRAINT fk_tunings_workload_id
        REFERENCES workloads ON DELETE CASCADE,
    gpu_type_id bigint NOT NULL CONSTRAINT fk_tunings_gpu_type_id
        REFERENCES gpu_types ON DELETE CASCADE,
    plan_id bigint NOT NULL CONSTRAINT fk_tunings_plan_id REFERENCES plans ON DELETE CASCADE,
    runtime text COLLATE "C" NOT NULL,
    space text COLLATE "C" NOT NULL,
    plans text[] NOT NULL,
    space_plans bigint NOT NULL,
    whole_plans bigint NOT NULL,
    CONSTRAINT uq_tunings_plan UNIQUE (plan_id, gpu_type_id, workload_id, runtime, space),
    CONSTRAINT ck_tunings_counts CHECK (space_plans >= 0 AND whole_plans >= space_plans)
);
CREATE INDEX ix_tunings_gpu_type_id ON tunings (gpu_type_id);
CREATE INDEX ix_tunings_workload_id ON tunings (workload_id);

CREATE TABLE webhook_events (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_webhook_events PRIMARY KEY,
    webhook_id bigint NOT NULL CONSTRAINT fk_webhook_events_webhook_id
        REFERENCES webhooks ON DELETE CASCADE,
    at timestamptz NOT NULL DEFAULT now(),
    event text COLLATE "C" NOT NULL,
    document jsonb NOT NULL
);
CREATE INDEX ix_webhook_events_webhook_id_id ON webhook_events (webhook_id, id);

CREATE TABLE gpus (
    node_id bigint NOT NULL CONSTRAINT fk_gpus_node_id REFERENCES nodes,
    gpu bigint NOT NULL,
    CONSTRAINT pk_gpus PRIMARY KEY (node_id, gpu),
    CONSTRAINT ck_gpus_gpu CHECK (gpu >= 0)
);

CREATE TABLE jobs (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_jobs PRIMARY KEY,
    cluster_id bigint NOT NULL CONSTRAINT fk_jobs_cluster_id REFERENCES clusters,
    name text COLLATE "C" NOT NULL,
    workload_id bigint NOT NULL CONSTRAINT fk_jobs_workload_id REFERENCES workloads,
    iterations bigint NOT NULL,
    requested_gpus bigint NOT NULL,
    requested_gpu_type text COLLATE "C" NOT NULL DEFAULT '',
    pinned_gpu_type boolean NOT NULL DEFAULT false,
    tenant text COLLATE "C" NOT NULL DEFAULT '',
    priority bigint NOT NULL DEFAULT 1,
    weight float8 NOT NULL,
    guaranteed boolean NOT NULL,
    pinned boolean NOT NULL,
    preemptible boolean NOT NULL DEFAULT false,
    deadline_s float8 NOT NULL,
    restart_s float8 NOT NULL,
    labels jsonb NOT NULL,
    command jsonb NOT NULL,
    max_retries bigint NOT NULL,
    profile boolean NOT NULL DEFAULT false,
    min_gpus bigint NOT NULL DEFAULT 0,
    max_gpus bigint NOT NULL DEFAULT 0,
    allowed_gpu_types jsonb NOT NULL DEFAULT '[]',
    node_selector text COLLATE "C" NOT NULL DEFAULT '',
    preferred_labels text COLLATE "C" NOT NULL DEFAULT '',
    longest_run_s float8 NOT NULL DEFAULT 'Infinity',
    plan_id bigint CONSTRAINT fk_jobs_plan_id REFERENCES plans,
    plan_first boolean NOT NULL DEFAULT false,
    submitted_plan_id bigint CONSTRAINT fk_jobs_submitted_plan_id REFERENCES plans,
    techniques jsonb NOT NULL DEFAULT '[]',
    requested_cpus bigint NOT NULL DEFAULT 0,
    runtime text COLLATE "C" NOT NULL,
    launch jsonb NOT NULL DEFAULT '{}',
    submitted_by text COLLATE "C" NOT NULL DEFAULT '',
    state text COLLATE "C" NOT NULL DEFAULT 'queued',
    version bigint NOT NULL DEFAULT 1,
    generation bigint NOT NULL DEFAULT 0,
    iterations_done float8 NOT NULL DEFAULT 0,
    retries bigint NOT NULL DEFAULT 0,
    last_error text COLLATE "C" NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    ended_at timestamptz,
    queued_at timestamptz NOT NULL DEFAULT now(),
    since_at timestamptz,
    service_gpu_s float8 NOT NULL DEFAULT 0,
    run_s float8 NOT NULL DEFAULT 0,
    admitted boolean NOT NULL DEFAULT false,
    schedule jsonb NOT NULL DEFAULT '[]',
    start_by_s float8,
    planned_start jsonb,
    opportunistic boolean NOT NULL DEFAULT false,
    rejection jsonb,
    cell_type_id bigint CONSTRAINT fk_jobs_cell_type_id REFERENCES gpu_types,
    cell_gpus bigint,
    cell_degree bigint,
    cell_plan_id bigint CONSTRAINT fk_jobs_cell_plan_id REFERENCES plans,
    cell_rate float8,
    cell_effective_gpus float8,
    cell_cpus bigint NOT NULL DEFAULT 0,
    cell_host_bytes bigint NOT NULL DEFAULT 0,
    leader_id bigint CONSTRAINT fk_jobs_leader_id REFERENCES nodes,
    failures bigint NOT NULL DEFAULT 0,
    retry_at timestamptz,
    ran_at timestamptz,
    progress_at timestamptz,
    unmet bigint NOT NULL DEFAULT 0,
    array_id bigint CONSTRAINT fk_jobs_array_id REFERENCES job_arrays,
    array_index bigint,
    CONSTRAINT uq_jobs_cluster_id_name UNIQUE (cluster_id, name),
    CONSTRAINT ck_jobs_allowed_gpu_types CHECK (jsonb_typeof(allowed_gpu_types) = 'array'),
    CONSTRAINT ck_jobs_array CHECK ((array_id IS NULL) = (array_index IS NULL)),
    CONSTRAINT ck_jobs_back_off CHECK (failures >= 0),
    CONSTRAINT ck_jobs_cell
        CHECK (CASE WHEN state IN ('running', 'starting') THEN num_nulls(cell_type_id, cell_gpus,
            cell_degree, cell_plan_id, cell_rate, leader_id) = 0 ELSE num_nonnulls(cell_type_id,
            cell_gpus, cell_degree, cell_plan_id, cell_rate) = 0 END),
    CONSTRAINT ck_jobs_cell_demand
        CHECK (cell_cpus >= 0 AND cell_host_bytes >= 0 AND (cell_gpus IS NOT NULL
            OR (cell_cpus = 0 AND cell_host_bytes = 0))),
    CONSTRAINT ck_jobs_schedule
        CHECK (jsonb_typeof(schedule) = 'array' AND (admitted OR schedule = '[]')),
    CONSTRAINT ck_jobs_counts CHECK (generation >= 0 AND retries >= 0 AND max_retries >= 0),
    CONSTRAINT ck_jobs_deadline CHECK (deadline_s > 0 AND deadline_s <= 'Infinity'),
    CONSTRAINT ck_jobs_dependencies
        CHECK (unmet = 0 OR (unmet > 0 AND state IN ('queued', 'held', 'cancelled', 'rejected'))),
    CONSTRAINT ck_jobs_gpu_bounds
        CHECK (min_gpus BETWEEN 0 AND requested_gpus AND (max_gpus = 0
            OR max_gpus >= requested_gpus)),
    CONSTRAINT ck_jobs_launch CHECK (runtime <> '' AND jsonb_typeof(launch) = 'object'),
    CONSTRAINT ck_jobs_opportunistic CHECK (NOT opportunistic OR state IN ('running', 'starting')),
    CONSTRAINT ck_jobs_pinned_gpu_type CHECK (NOT pinned_gpu_type OR requested_gpu_type <> ''),
    CONSTRAINT ck_jobs_planned_start CHECK (jsonb_typeof(planned_start->'nodes') = 'object'),
    CONSTRAINT ck_jobs_positive CHECK (iterations > 0 AND requested_gpus > 0 AND priority > 0),
    CONSTRAINT ck_jobs_progress CHECK (iterations_done >= 0 AND iterations_done < 'Infinity'),
    CONSTRAINT ck_jobs_rejection CHECK (rejection IS NULL OR state = 'rejected'),
    CONSTRAINT ck_jobs_restart CHECK (restart_s >= 0 AND restart_s < 'Infinity'),
    CONSTRAINT ck_jobs_run_time
        CHECK (longest_run_s > 0 AND longest_run_s <= 'Infinity' AND run_s >= 0
            AND run_s < 'Infinity'),
    CONSTRAINT ck_jobs_service CHECK (service_gpu_s >= 0 AND service_gpu_s < 'Infinity'),
    CONSTRAINT ck_jobs_since CHECK ((since_at IS NOT NULL) = (state IN ('running', 'starting'))),
    CONSTRAINT ck_jobs_start
        CHECK (num_nonnulls(start_by_s, planned_start) = 0 OR state IN ('queued', 'stopping')),
    CONSTRAINT ck_jobs_start_by CHECK (start_by_s > 0 AND start_by_s < 'Infinity'),
    CONSTRAINT ck_jobs_state
        CHECK (state IN ('queued', 'held', 'starting', 'running', 'stopping', 'holding',
            'cancelling', 'failing', 'succeeded', 'failed', 'cancelled', 'rejected')),
    CONSTRAINT ck_jobs_plan CHECK (NOT plan_first OR plan_id IS NOT NULL),
    CONSTRAINT ck_jobs_techniques
        CHECK (requested_cpus >= 0 AND jsonb_typeof(techniques) = 'array'),
    CONSTRAINT ck_jobs_weight CHECK (weight > 0 AND weight < 'Infinity')
);
CREATE INDEX ix_jobs_array_id ON jobs (array_id) WHERE array_id IS NOT NULL;
CREATE INDEX ix_jobs_cell_plan_id ON jobs (cell_plan_id) WHERE cell_plan_id IS NOT NULL;
CREATE INDEX ix_jobs_cell_type_id ON jobs (cell_type_id) WHERE cell_type_id IS NOT NULL;
CREATE INDEX ix_jobs_ended_at ON jobs (cluster_id, ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX ix_jobs_leader_id ON jobs (leader_id) WHERE leader_id IS NOT NULL;
CREATE INDEX ix_jobs_leaving ON jobs (cluster_id, id)
    WHERE state IN ('cancelling', 'failing', 'holding', 'stopping');
CREATE INDEX ix_jobs_live ON jobs (cluster_id, id)
    WHERE state NOT IN ('succeeded', 'failed', 'cancelled', 'rejected');
CREATE INDEX ix_jobs_plan_id ON jobs (plan_id) WHERE plan_id IS NOT NULL;
CREATE INDEX ix_jobs_submitted_plan_id ON jobs (submitted_plan_id)
    WHERE submitted_plan_id IS NOT NULL;
CREATE INDEX ix_jobs_tenant ON jobs (cluster_id, tenant, state);
CREATE INDEX ix_jobs_workload_id ON jobs (workload_id);

CREATE TABLE reservation_nodes (
    reservation_id bigint NOT NULL CONSTRAINT fk_reservation_nodes_reservation_id
        REFERENCES reservations ON DELETE CASCADE,
    node_id bigint NOT NULL CONSTRAINT fk_reservation_nodes_node_id REFERENCES nodes,
    CONSTRAINT pk_reservation_nodes PRIMARY KEY (reservation_id, node_id)
);
CREATE INDEX ix_reservation_nodes_node_id ON reservation_nodes (node_id);

CREATE TABLE allocations (
    node_id bigint NOT NULL,
    gpu bigint NOT NULL,
    job_id bigint NOT NULL CONSTRAINT fk_allocations_job_id REFERENCES jobs,
    generation bigint NOT NULL,
    hold text COLLATE "C" NOT NULL,
    release_revision bigint,
    CONSTRAINT pk_allocations PRIMARY KEY (node_id, gpu, job_id, generation),
    CONSTRAINT fk_allocations_node_id_gpu FOREIGN KEY (node_id, gpu) REFERENCES gpus,
    CONSTRAINT ck_allocations_generation CHECK (generation > 0),
    CONSTRAINT ck_allocations_hold CHECK (hold IN ('held', 'releasing', 'reserved')),
    CONSTRAINT ck_allocations_release CHECK ((hold = 'releasing') = (release_revision IS NOT NULL))
);
CREATE INDEX ix_allocations_job_id ON allocations (job_id);
CREATE UNIQUE INDEX uq_allocations_holder ON allocations (node_id, gpu)
    WHERE hold IN ('held', 'releasing');
CREATE UNIQUE INDEX uq_allocations_successor ON allocations (node_id, gpu) WHERE hold = 'reserved';

CREATE TABLE failed_starts (
    job_id bigint NOT NULL CONSTRAINT fk_failed_starts_job_id REFERENCES jobs ON DELETE CASCADE,
    node_id bigint NOT NULL CONSTRAINT fk_failed_starts_node_id REFERENCES nodes ON DELETE CASCADE,
    gpus bigint NOT NULL,
    counted boolean NOT NULL DEFAULT false,
    CONSTRAINT pk_failed_starts PRIMARY KEY (job_id, node_id)
);
CREATE INDEX ix_failed_starts_node_id ON failed_starts (node_id);

CREATE TABLE forecast_spreads (
    job_id bigint NOT NULL CONSTRAINT fk_forecast_spreads_job_id REFERENCES jobs ON DELETE CASCADE,
    event text COLLATE "C" NOT NULL,
    created_at timestamptz NOT NULL,
    times_s float8[] NOT NULL,
    CONSTRAINT pk_forecast_spreads PRIMARY KEY (job_id, event),
    CONSTRAINT ck_forecast_spreads_event CHECK (event IN ('start', 'finish')),
    CONSTRAINT ck_forecast_spreads_times CHECK (cardinality(times_s) > 0)
);

CREATE TABLE forecasts (
    job_id bigint CONSTRAINT pk_forecasts PRIMARY KEY CONSTRAINT fk_forecasts_job_id
        REFERENCES jobs ON DELETE CASCADE,
    created_at timestamptz NOT NULL,
    document jsonb NOT NULL
);

CREATE TABLE job_avoids (
    job_id bigint NOT NULL CONSTRAINT fk_job_avoids_job_id REFERENCES jobs ON DELETE CASCADE,
    node_id bigint NOT NULL CONSTRAINT fk_job_avoids_node_id REFERENCES nodes,
    CONSTRAINT pk_job_avoids PRIMARY KEY (job_id, node_id)
);
CREATE INDEX ix_job_avoids_node_id ON job_avoids (node_id);

CREATE TABLE job_dependencies (
    job_id bigint NOT NULL CONSTRAINT fk_job_dependencies_job_id REFERENCES jobs ON DELETE CASCADE,
    position bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    tenant text COLLATE "C" NOT NULL,
    condition text COLLATE "C" NOT NULL,
    met boolean NOT NULL DEFAULT false,
    on_job_id bigint CONSTRAINT fk_job_dependencies_on_job_id REFERENCES jobs ON DELETE SET NULL,
    on_array_id bigint CONSTRAINT fk_job_dependencies_on_array_id
        REFERENCES job_arrays ON DELETE SET NULL,
    CONSTRAINT pk_job_dependencies PRIMARY KEY (job_id, position),
    CONSTRAINT ck_job_dependencies_condition CHECK (condition IN ('succeeded', 'ended', 'failed')),
    CONSTRAINT ck_job_dependencies_target CHECK (num_nonnulls(on_job_id, on_array_id) <= 1)
);
CREATE INDEX ix_job_dependencies_on_array_id ON job_dependencies (on_array_id)
    WHERE on_array_id IS NOT NULL;
CREATE INDEX ix_job_dependencies_on_job_id ON job_dependencies (on_job_id)
    WHERE on_job_id IS NOT NULL;

CREATE TABLE job_history (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_job_history PRIMARY KEY,
    job_id bigint NOT NULL CONSTRAINT fk_job_history_job_id REFERENCES jobs ON DELETE CASCADE,
    at timestamptz NOT NULL DEFAULT now(),
    event text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL,
    detail jsonb NOT NULL DEFAULT '""'
);
CREATE INDEX ix_job_history_job_id ON job_history (job_id);

CREATE TABLE job_starts (
    job_id bigint NOT NULL CONSTRAINT fk_job_starts_job_id REFERENCES jobs ON DELETE CASCADE,
    generation bigint NOT NULL,
    given_at timestamptz NOT NULL DEFAULT now(),
    shares jsonb NOT NULL,
    CONSTRAINT pk_job_starts PRIMARY KEY (job_id, generation),
    CONSTRAINT ck_job_starts_generation CHECK (generation > 0),
    CONSTRAINT ck_job_starts_shares CHECK (jsonb_typeof(shares) = 'array')
);

CREATE TABLE measured_traffic (
    job_id bigint NOT NULL CONSTRAINT fk_measured_traffic_job_id REFERENCES jobs ON DELETE CASCADE,
    node_id bigint NOT NULL CONSTRAINT fk_measured_traffic_node_id REFERENCES nodes,
    generation bigint NOT NULL,
    period_s float8 NOT NULL,
    sent_bytes float8 NOT NULL,
    unhindered boolean NOT NULL DEFAULT false,
    CONSTRAINT pk_measured_traffic PRIMARY KEY (job_id, node_id),
    CONSTRAINT ck_measured_traffic_period CHECK (period_s > 0 AND period_s < 'Infinity'),
    CONSTRAINT ck_measured_traffic_sent_bytes CHECK (sent_bytes > 0 AND sent_bytes < 'Infinity')
);
CREATE INDEX ix_measured_traffic_node_id ON measured_traffic (node_id);

CREATE TABLE measurements (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_measurements PRIMARY KEY,
    workload_id bigint NOT NULL CONSTRAINT fk_measurements_workload_id REFERENCES workloads,
    gpu_type_id bigint NOT NULL CONSTRAINT fk_measurements_gpu_type_id REFERENCES gpu_types,
    gpus bigint NOT NULL,
    nodes bigint NOT NULL,
    pipeline_degree bigint NOT NULL,
    plan_id bigint NOT NULL CONSTRAINT fk_measurements_plan_id REFERENCES plans,
    job_id bigint CONSTRAINT fk_measurements_job_id REFERENCES jobs ON DELETE SET NULL,
    generation bigint NOT NULL,
    skipped bigint NOT NULL DEFAULT 0,
    samples float8[] NOT NULL DEFAULT '{}',
    iter_time_s float8,
    source bigint NOT NULL DEFAULT 0,
    changed_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT uq_measurements_job_id_generation UNIQUE (job_id, generation),
    CONSTRAINT ck_measurements_iter_time CHECK (iter_time_s > 0 AND iter_time_s < 'Infinity'),
    CONSTRAINT ck_measurements_shape CHECK (gpus > 0 AND nodes BETWEEN 1 AND gpus),
    CONSTRAINT ck_measurements_source CHECK (source IN (0, 3))
);
CREATE INDEX ix_measurements_gpu_type_id ON measurements (gpu_type_id);
CREATE INDEX ix_measurements_plan_id ON measurements (plan_id);
CREATE INDEX ix_measurements_workload_id ON measurements (workload_id);

CREATE TABLE standings (
    job_id bigint CONSTRAINT pk_standings PRIMARY KEY CONSTRAINT fk_standings_job_id
        REFERENCES jobs ON DELETE CASCADE,
    generation bigint NOT NULL,
    rank bigint NOT NULL,
    level bigint NOT NULL,
    tag bigint NOT NULL DEFAULT -1,
    document jsonb NOT NULL,
    CONSTRAINT ck_standings_numbers CHECK (rank >= 0 AND level >= 0 AND tag BETWEEN -1 AND 63)
);

CREATE TABLE stints (
    id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_stints PRIMARY KEY,
    job_id bigint NOT NULL CONSTRAINT fk_stints_job_id REFERENCES jobs ON DELETE CASCADE,
    gpu_type text COLLATE "C" NOT NULL,
    gpus bigint NOT NULL,
    cpus bigint NOT NULL,
    host_bytes bigint NOT NULL DEFAULT 0,
    effective_gpus float8 NOT NULL,
    began_at timestamptz NOT NULL,
    trained_at timestamptz,
    ended_at timestamptz NOT NULL,
    ending text COLLATE "C" NOT NULL,
    CONSTRAINT ck_stints_counts CHECK (gpus > 0 AND cpus >= 0 AND host_bytes >= 0),
    CONSTRAINT ck_stints_effective_gpus CHECK (effective_gpus >= 0 AND effective_gpus < 'Infinity'),
    CONSTRAINT ck_stints_times CHECK (began_at <= ended_at)
);
CREATE INDEX ix_stints_job_id ON stints (job_id);

CREATE TABLE trainings (
    job_id bigint CONSTRAINT pk_trainings PRIMARY KEY CONSTRAINT fk_trainings_job_id
        REFERENCES jobs ON DELETE CASCADE,
    generation bigint NOT NULL DEFAULT 0,
    loss float8,
    memory_bytes bigint NOT NULL DEFAULT 0,
    checkpoint_iterations float8,
    checkpoint_at timestamptz,
    start_times jsonb,
    restarts_s float8[] NOT NULL DEFAULT '{}',
    restart_s float8,
    restart_generation bigint NOT NULL DEFAULT 0,
    tuned_generation bigint NOT NULL DEFAULT 0,
    exit_reason text COLLATE "C" NOT NULL DEFAULT '',
    remark text COLLATE "C" NOT NULL DEFAULT '',
    failed_cell jsonb,
    CONSTRAINT ck_trainings_checkpoint
        CHECK (checkpoint_iterations >= 0 AND checkpoint_iterations < 'Infinity'),
    CONSTRAINT ck_trainings_loss CHECK (loss > '-Infinity' AND loss < 'Infinity'),
    CONSTRAINT ck_trainings_memory CHECK (memory_bytes >= 0),
    CONSTRAINT ck_trainings_restart CHECK (restart_s > 0 AND restart_s < 'Infinity')
);

CREATE FUNCTION check_job_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.state, NEW.state) NOT IN (
        ('queued', 'cancelled'),
        ('queued', 'failed'),
        ('queued', 'held'),
        ('queued', 'rejected'),
        ('queued', 'starting'),
        ('held', 'cancelled'),
        ('held', 'queued'),
        ('held', 'rejected'),
        ('starting', 'cancelling'),
        ('starting', 'failing'),
        ('starting', 'holding'),
        ('starting', 'running'),
        ('starting', 'stopping'),
        ('starting', 'succeeded'),
        ('running', 'cancelling'),
        ('running', 'failing'),
        ('running', 'holding'),
        ('running', 'starting'),
        ('running', 'stopping'),
        ('running', 'succeeded'),
        ('stopping', 'cancelling'),
        ('stopping', 'failing'),
        ('stopping', 'holding'),
        ('stopping', 'queued'),
        ('stopping', 'starting'),
        ('stopping', 'succeeded'),
        ('holding', 'cancelling'),
        ('holding', 'held'),
        ('holding', 'stopping'),
        ('holding', 'succeeded'),
        ('cancelling', 'cancelled'),
        ('cancelling', 'succeeded'),
        ('failing', 'failed')
    ) THEN
        RAISE EXCEPTION 'a job that is % cannot become %', OLD.state, NEW.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'jobs_transition';
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION check_job_owns_nothing() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM allocations a JOIN jobs j ON j.id = a.job_id
        WHERE a.job_id = NEW.id AND a.hold <> 'releasing' AND j.state = NEW.state
    ) THEN
        RAISE EXCEPTION 'a job that is % cannot own GPUs', NEW.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'jobs_own_nothing';
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION require_node_capacity(node bigint) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off AS $$
DECLARE
    has record;
    needs record;
BEGIN
    IF NOT EXISTS (
        SELECT FROM nodes n WHERE n.id = node
            AND (coalesce(n.cpus, n.reported_cpus) IS NOT NULL
                OR coalesce(n.host_bytes, n.reported_host_bytes) IS NOT NULL)
    ) THEN
        RETURN;
    END IF;
    -- Whoever gives something of this node away waits here, and then sees what others gave.
    SELECT n.name, coalesce(n.cpus, n.reported_cpus) AS cpus,
        coalesce(n.host_bytes, n.reported_host_bytes) AS host_bytes
    INTO has FROM nodes n WHERE n.id = node FOR NO KEY UPDATE;
    -- A job's share is that of its GPUs here, rounded up, as in formulation.state.demand. Whole parts and
    -- the rest are multiplied separately, so that nothing overflows.
    SELECT coalesce(sum(cell_cpus / cell_gpus * gpus
            + (cell_cpus % cell_gpus * gpus + cell_gpus - 1) / cell_gpus), 0) AS cpus,
        coalesce(sum(cell_host_bytes / cell_gpus * gpus
            + (cell_host_bytes % cell_gpus * gpus + cell_gpus - 1) / cell_gpus), 0) AS host_bytes
    INTO needs FROM (
        SELECT j.cell_cpus, j.cell_host_bytes, j.cell_gpus, count(*) AS gpus
        FROM allocations a JOIN jobs j ON j.id = a.job_id
        WHERE a.node_id = node AND a.hold <> 'releasing' AND j.cell_gpus > 0 GROUP BY j.id
    ) AS shares;
    IF needs.cpus > has.cpus THEN
        RAISE EXCEPTION 'node % has % CPU cores, but its jobs need %; stop or move one of them first,'
            ' or state more cores', has.name, has.cpus, needs.cpus
            USING ERRCODE = 'check_violation', CONSTRAINT = 'node_capacity';
    END IF;
    IF needs.host_bytes > has.host_bytes THEN
        RAISE EXCEPTION 'node % has % bytes of host memory, but its jobs need %; stop or move one of'
            ' them first, or state more memory', has.name, has.host_bytes, needs.host_bytes
            USING ERRCODE = 'check_violation', CONSTRAINT = 'node_capacity';
    END IF;
END $$;

CREATE FUNCTION check_allocation_capacity() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM require_node_capacity(NEW.node_id);
    RETURN NULL;
END $$;

CREATE FUNCTION check_job_capacity() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM require_node_capacity(a.node_id) FROM (
        SELECT DISTINCT node_id FROM allocations WHERE job_id = NEW.id AND hold <> 'releasing'
        ORDER BY node_id
    ) AS a;
    RETURN NULL;
END $$;

CREATE FUNCTION check_node_capacity() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM require_node_capacity(NEW.id);
    RETURN NULL;
END $$;

CREATE FUNCTION check_audit_log_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('tessera.pruning', true) = 'on' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'entries of the audit log can only be added, but this is %', TG_OP
        USING ERRCODE = 'check_violation', CONSTRAINT = 'audit_log_append_only';
END $$;

CREATE FUNCTION check_stated_schema() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    stated text := current_setting('tessera.schema', true);
    present text;
BEGIN
    IF stated = 'migration' THEN
        RETURN NULL;
    END IF;
    SELECT version_num INTO present FROM alembic_version;
    IF stated IS DISTINCT FROM present THEN
        RAISE EXCEPTION 'the database has schema %, and a program for % may not write to it; upgrade'
            ' that program, or run `tessera migrate` if it is newer',
            present, coalesce('schema ' || nullif(stated, ''), 'an older schema')
            USING ERRCODE = 'undefined_table', CONSTRAINT = 'schema_fence';
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER jobs_transition BEFORE UPDATE OF state ON jobs FOR EACH ROW
WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION check_job_transition();

CREATE CONSTRAINT TRIGGER jobs_own_nothing AFTER UPDATE OF state ON jobs
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN (NEW.state NOT IN ('running', 'starting')) EXECUTE FUNCTION check_job_owns_nothing();

CREATE CONSTRAINT TRIGGER allocations_capacity AFTER INSERT ON allocations
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN (NEW.hold <> 'releasing') EXECUTE FUNCTION check_allocation_capacity();

CREATE CONSTRAINT TRIGGER allocations_moved_capacity AFTER UPDATE OF node_id, job_id, hold ON allocations
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN (NEW.hold <> 'releasing' AND (
    OLD.hold = 'releasing' OR NEW.node_id <> OLD.node_id OR NEW.job_id <> OLD.job_id
)) EXECUTE FUNCTION check_allocation_capacity();

CREATE CONSTRAINT TRIGGER jobs_capacity AFTER UPDATE OF cell_cpus, cell_host_bytes, cell_gpus ON jobs
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN ((NEW.cell_cpus > 0 OR NEW.cell_host_bytes > 0)
    AND (NEW.cell_cpus, NEW.cell_host_bytes, NEW.cell_gpus)
        IS DISTINCT FROM (OLD.cell_cpus, OLD.cell_host_bytes, OLD.cell_gpus))
EXECUTE FUNCTION check_job_capacity();

CREATE CONSTRAINT TRIGGER nodes_capacity
AFTER UPDATE OF cpus, host_bytes, reported_cpus, reported_host_bytes ON nodes
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN ((NEW.cpus, NEW.host_bytes, NEW.reported_cpus, NEW.reported_host_bytes)
    IS DISTINCT FROM (OLD.cpus, OLD.host_bytes, OLD.reported_cpus, OLD.reported_host_bytes))
EXECUTE FUNCTION check_node_capacity();

CREATE TRIGGER audit_log_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
FOR EACH STATEMENT EXECUTE FUNCTION check_audit_log_change();
